"""The navigation is the front page: the links of each of its parts, in their order.

A page that the front page does not name is added by its folder, so that a new page is never missing.
"""

from __future__ import annotations

import posixpath
import re

from sphinx.application import Sphinx

PART = re.compile(r"^## (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)\.md(?:#[^)]*)?\)")
FOLDERS = {"tutorials": "Tutorials", "equations": "Explanation", "paper": "Explanation", "reference": "Reference"}
OTHERS = "How-to guides"
ABOVE = {"overview": "Tutorials"}  # what the front page names above its parts
TITLES = {"overview": "A tour in five minutes"}  # in the navigation, where the page's own would not tell


def parts_of(front: str, pages: set[str]) -> dict[str, list[str]]:
    """The pages of each part of the front page."""
    pieces = PART.split(front)[1:]
    parts: dict[str, list[str]] = {}
    named = {"index"}
    for title, text in zip(pieces[::2], pieces[1::2], strict=True):
        new = [page for page in dict.fromkeys(LINK.findall(text)) if page in pages and page not in named]
        named |= set(new)
        parts[title] = new
    for page in sorted(pages - named):
        folder = page.partition("/")[0] if "/" in page else ""
        if f"{folder}/README" in pages and page != f"{folder}/README":
            continue  # below its folder's own page
        if page in ABOVE:
            parts[ABOVE[page]].insert(0, page)
        else:
            parts[FOLDERS.get(folder, OTHERS)].append(page)
    return {title: found for title, found in parts.items() if found}


def toctree(pages: list[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "", "```{toctree}", *options, "", *map(_entry, pages), "```", ""])


def _entry(page: str) -> str:
    title = TITLES.get(page.removeprefix("/"))
    return f"{title} <{page}>" if title else page


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)


def _read(app: Sphinx, docname: str, content: list[str]) -> None:
    pages = set(app.env.found_docs)
    if docname == "index":
        content[0] += "".join(toctree(["/" + page for page in found], part) for part, found in
                              parts_of(content[0], pages).items())  # fmt: skip
    elif posixpath.basename(docname) == "README":
        folder = posixpath.dirname(docname)
        below = [f"{folder}/{link}" for link in LINK.findall(content[0]) if f"{folder}/{link}" in pages]
        rest = [page for page in sorted(pages) if posixpath.dirname(page) == folder and page != docname]
        content[0] += toctree(["/" + page for page in dict.fromkeys(below + rest)])
