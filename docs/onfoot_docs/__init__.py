"""The Sphinx extension behind the site of the documentation."""

from typing import Any

from sphinx.application import Sphinx

from onfoot_docs import dead_links, explorer, formulas, links, navigation, outside, reference, sources


def setup(app: Sphinx) -> dict[str, Any]:
    for part in (outside, navigation, links, sources, formulas, reference, explorer, dead_links):
        part.setup(app)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
