"""No dead link: after the build, every link and every anchor of every page is looked up in what was written."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ATTRIBUTE = re.compile(r"""<(?P<tag>\w+)\b(?P<rest>[^<>]*?\s(?:id|name|href|src)=[^<>]*)>""")
VALUE = re.compile(r"""\s(?P<name>id|name|href|src)=(?:"(?P<a>[^"]*)"|'(?P<b>[^']*)'|(?P<c>[^\s>]+))""")


class Page:
    """The links and anchors of a page."""

    def __init__(self, text: str) -> None:
        self.links: set[str] = set()
        self.anchors: set[str] = {"", "top"}
        self.remote: set[str] = set()
        for element in ATTRIBUTE.finditer(text):
            for found in VALUE.finditer(element["rest"]):
                value = unescape(found["a"] or found["b"] or found["c"] or "")
                if found["name"] in ("id", "name"):
                    self.anchors.add(value)
                elif not urlsplit(value).scheme and not value.startswith("//"):
                    self.links.add(value)
                elif element["tag"] != "a" and not value.startswith("data:"):
                    self.remote.add(value)  # something that the page would load from elsewhere


def dead_links(site: Path) -> list[str]:
    """Every link of a site that leads nowhere, and every address outside that a page would load."""
    files = [path for path in sorted(site.rglob("*.html")) if "explorer" not in path.relative_to(site).parts]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in files}
    found: list[str] = []
    exists = cache(Path.is_file)
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        found += [f"{name} loads {address}" for address in sorted(page.remote)]
        for link in sorted(page.links):
            parts = urlsplit(link)
            target = Path(normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not exists(target):
                found.append(f"{name}: {link}: no such page")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link}: no such anchor")
    return found


def setup(app: Sphinx) -> None:
    app.connect("build-finished", _finished)


def _finished(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        found = dead_links(Path(app.outdir).resolve())
        if found:
            raise SphinxError("dead links:\n" + "\n".join(found))
