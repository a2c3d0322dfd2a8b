"""Links as GitHub reads them, relative to the file: to other pages, to anchors and to files of the repository.

A link to a page leads to its HTML; a link to any other file or folder of the repository leads to a page that shows it
(`sources.py`), so no link of the site leaves it but those with a scheme. Behind the label of an equation, the link
leads to the line that carries the equation's id. The name of a test becomes a link to it; so does, in docs/paper/, the
name of a function relative to the package, such as `ops.attention.softmax`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from onfoot_docs import sources
from onfoot_docs.outside import outside

logger = logging.getLogger(__name__)
ANCHOR = re.compile(r'<a id="([^"]+)">')
PAGES: dict[Path, str] = {}
LABEL = re.compile(r"\(((?:\d+(?:\.[a-d])?|[A-Z]+\.\d+))\)")


def _pages(env: BuildEnvironment) -> dict[Path, str]:
    """File -> the page that shows it, also by the name of a file that is nothing but a link to another."""
    if not PAGES:
        files = {Path(env.doc2path(name)).resolve(): name for name in env.found_docs}
        PAGES.update(files | {outside(file): name for file, name in files.items()})
    return PAGES


class ResolveLinks(SphinxPostTransform):
    """Replaces the target of every link by its address on the site."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        here = outside(Path(self.env.doc2path(self.env.docname)).resolve())
        for link in self.document.findall(nodes.reference):
            address = link.get("refuri", "")
            if address.startswith("source:"):  # of the reference
                page, _, anchor = address.removeprefix("source:").partition("#")
                link["refuri"] = f"{self.app.builder.get_relative_uri(self.env.docname, page)}#{anchor}"
                continue
            if address and not re.match(r"[a-z]+:", address) and not link.get("internal"):
                link["refuri"] = self._address(address, here, link)
        for name in list(self.document.findall(nodes.literal)):
            place = sources.tests().get(name.astext()) or self._function(name)
            if place and not isinstance(name.parent, nodes.reference):
                file, line = place
                sources.wanted(self.env).add(file)
                page = self.app.builder.get_relative_uri(self.env.docname, sources.page_name(file))
                name.replace_self(nodes.reference("", "", name.deepcopy(), refuri=f"{page}#L{line}"))

        for cell in self.document.findall(nodes.entry):
            for name in list(cell.findall(nodes.literal)):
                _let_break(name)

    def _function(self, name: nodes.literal) -> tuple[str, int] | None:
        """File and line of a function of the package: in the row of an equation, the line that carries its id."""
        found = sources.function(name.astext()) if self.env.docname.startswith("paper/") else None
        if found is None:
            return None
        file, first, last = found
        row = next((above for above in _ancestors(name) if isinstance(above, nodes.row)), None)
        label = LABEL.match(row.children[0].astext()) if row is not None else None
        carried = sources.equation_lines(sources.ROOT / file).items() if label else ()
        return file, next((n for n, ids in carried if label and label[1] in ids and first <= n <= last), first)

    def _address(self, address: str, here: Path, link: nodes.reference) -> str:
        file, _, anchor = address.partition("#")
        if not file:
            return address
        target = (here.parent / file).resolve()
        builder, docname = self.app.builder, self.env.docname
        pages = _pages(self.env)
        if target / "README.md" in pages:
            target /= "README.md"
        if target in pages:
            return builder.get_relative_uri(docname, pages[target]) + (f"#{anchor}" if anchor else "")
        if not target.exists() or sources.ROOT not in target.parents:
            logger.warning("%s: no such file in the repository", address, location=link, type="link")
            return address
        name = target.relative_to(sources.ROOT).as_posix()
        sources.wanted(self.env).add(name)
        line = anchor or self._line_of_test(name, link) or self._line_of_equation(target, link)
        return builder.get_relative_uri(docname, sources.page_name(name)) + (f"#{line}" if line else "")

    @staticmethod
    def _line_of_test(file: str, link: nodes.reference) -> str:
        """The anchor of the test in this file whose name is the text of the link."""
        line = sources.tests_of(file).get(link.astext()) if Path(file).name.startswith("test_") else None
        return f"L{line}" if line else ""

    @staticmethod
    def _line_of_equation(target: Path, link: nodes.reference) -> str:
        """The anchor of the line that carries the equation whose label the link stands behind."""
        before = link.parent.children[: link.parent.index(link)] if link.parent else []
        labels = [LABEL.fullmatch(node.astext()) for node in before if isinstance(node, nodes.strong)]
        if not labels or not labels[-1] or target.suffix != ".py":
            return ""
        return next((f"L{n}" for n, ids in sources.equation_lines(target).items() if labels[-1][1] in ids), "")


def _let_break(name: nodes.literal) -> None:
    """Lets a long name in a table break into lines behind its points and underscores."""
    pieces = re.split(r"(?<=\w[._])(?=\w)", name.astext())
    if len(pieces) > 1:
        first, *rest = map(nodes.Text, pieces)
        name.children = []
        name += [first, *(node for piece in rest for node in (nodes.raw("", "<wbr>", format="html"), piece))]


def _ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _labels_have_targets(app: Sphinx, document: nodes.document) -> None:
    """Warns about labels `**(25)**` of equations without an anchor of their id right before them."""
    for strong in document.findall(nodes.strong):
        label = LABEL.fullmatch(strong.astext())
        if not label or not app.env.docname.startswith("equations/"):
            continue
        at = strong.parent.index(strong)
        before = "".join(node.astext() for node in strong.parent.children[max(0, at - 3) : at])
        anchor = ANCHOR.search(before)
        if not anchor or anchor[1] != "eq-" + label[1].lower().replace(".", "-"):
            logger.warning("equation (%s) has no target", label[1], location=strong, type="link")


def setup(app: Sphinx) -> None:
    app.add_post_transform(ResolveLinks)
    app.connect("doctree-read", _labels_have_targets)
