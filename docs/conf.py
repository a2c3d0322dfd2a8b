"""The site of the documentation: `make docs` builds it from the pages of this folder, and fails on any warning.

The pages are plain Markdown that also reads well in the repository. What only a site can do is in `onfoot_docs/`, one
idea per file: links, pages of source code, formulas, the reference, the navigation and the embedded explorer.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import onfoot  # noqa: E402

project = "onfoot"
author = "the authors of onfoot"
version = release = onfoot.__version__

extensions = ["myst_parser", "onfoot_docs"]
exclude_patterns = ["onfoot_docs", "images"]
root_doc = "index"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # the types in signatures: NumPy's and Python's own pages are not here

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as GitHub makes them
myst_all_links_external = True  # onfoot_docs/links.py resolves them, as GitHub does: relative to the file
myst_dmath_double_inline = True

html_theme = "furo"
html_title = "onfoot"
html_show_search_summary = False  # excerpts are fetched, which a browser refuses for pages opened as files
html_math_renderer = "mathml"
EXPLORER = "../src/onfoot/explore/static"
html_static_path = ["onfoot_docs/static", f"{EXPLORER}/onfoot-math.woff2", f"{EXPLORER}/onfoot-math-license.txt"]
templates_path = ["onfoot_docs/templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
highlight_language = "none"
python_maximum_signature_line_length = 100
smartquotes = False  # "--full" is no dash
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
