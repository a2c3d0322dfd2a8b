"""Formulas as MathML, made while the site is built: no script and no network is needed to show them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)
UPRIGHT = re.compile(r'(?:<mi mathvariant="normal">[A-Za-z]</mi>){2,}')
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
BARS = "‖∥|"
FUNCTIONS = {"log", "ln", "exp", "sin", "cos"}  # max and min are operators in MathML, with space of their own
CHILDREN = {"msub", "msup", "msubsup", "mfrac", "munder", "mover", "munderover", "mroot"}  # a fixed number of them
ElementTree.register_namespace("", NAMESPACE)


def mathml(tex: str, display: str) -> str:
    """A formula's MathML; a ValueError if a command is not known."""
    found = convert(tex, display=display)
    unknown = re.search(r"\\[A-Za-z]+", found)
    if unknown:
        raise ValueError(f"{unknown[0]} is not known")
    words = UPRIGHT.sub(lambda word: f"<mi>{''.join(re.findall(r'>(.)<', word[0]))}</mi>", found)  # softmax: one name
    tree = ElementTree.fromstring(words)
    for element in tree.iter():
        name = _name(element)
        if name == "mover" and len(element) == 2 and element[1].text == "~":
            # A tilde as wide as what it broadcasts: few fonts have one that stretches, so the style draws it.
            element.tag = f"{{{NAMESPACE}}}mrow"
            element.attrib = {"class": "tilde", "title": "broadcast"}
            element.remove(element[1])
        elif name == "mo" and (element.text or "") in BARS:
            element.set("stretchy", "false")
        elif name == "mo" and element.text == "∞":
            element.tag = f"{{{NAMESPACE}}}mi"  # a value, not an operator with space around it
    for element in list(tree.iter()):
        if _name(element) not in CHILDREN:
            _space_arguments(element)
            _group_matrices(element)
    return ElementTree.tostring(tree, encoding="unicode")


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _space_arguments(row: ElementTree.Element) -> None:
    """log y, not logy: a thin space between the name of a function and an argument without parentheses."""
    for i in reversed(range(len(row) - 1)):
        name, argument = (one[0] if _name(one) in CHILDREN else one for one in (row[i], row[i + 1]))
        if name.text in FUNCTIONS and _name(argument) != "mo":
            row.insert(i + 1, ElementTree.Element(f"{{{NAMESPACE}}}mspace", width="0.1667em"))


def _group_matrices(row: ElementTree.Element) -> None:
    """A row of its own for each matrix in its fences, which stretch to the highest neighbour in their row."""
    for matrix in [element for element in row if _name(element) == "mtable"]:
        i = list(row).index(matrix)
        around = row[max(i - 1, 0) : i + 2]
        if [element.text for element in around] == ["(", None, ")"]:
            row[i - 1 : i + 2] = [ElementTree.Element(f"{{{NAMESPACE}}}mrow")]
            row[i - 1].extend(around)


def _visit(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    try:
        self.body.append(mathml(node.astext(), display))
    except Exception as error:  # whatever the converter raises, it is the formula's fault
        logger.warning("formula $%s$: %s", node.astext(), error, location=node, type="formula")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_visit, None), (_visit, None))
