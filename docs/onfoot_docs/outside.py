"""Pages of the repository that lie outside docs/: a page here that is nothing but a link to one becomes it.

`docs/contributing.md` says `See [CONTRIBUTING.md](../CONTRIBUTING.md).` In the repository that is a link; on the site,
the page shows the file itself, and links to the file lead to the page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ONE_LINK = re.compile(r"\s*See \[[^]]*\]\((\.\./[^)#]+\.md)\)\.\s*")

PICTURE = re.compile(r"(!\[[^]]*\]\()(?!https?:)([^)]+)")


def outside(page: Path) -> Path:
    """The file whose text a page shows: itself, or the one that it only links to."""
    link = ONE_LINK.fullmatch(page.read_text(encoding="utf-8"))
    return (page.parent / link[1]).resolve() if link else page


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)


def _read(app: Sphinx, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname)).resolve()
    shown = outside(page)
    content[0] = shown.read_text(encoding="utf-8")
    if shown != page:  # pictures are looked up from the page; links from the file, in links.py
        content[0] = PICTURE.sub(
            lambda link: link[1] + os.path.relpath(shown.parent / link[2], page.parent), content[0]
        )
