"""A page of docs/equations as text for a terminal: formulas in Unicode, without links, tests and code to try."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from onfoot.learn.answer import WIDTH, wrapped
from onfoot.learn.tex import plain_formula

LEFT_OUT = ("Try it", "Second order", "Index")  # sections that are not about the exercise
LINK_ALONE = re.compile(r"(?<=[.)] )\[[^\]]*\]\([^)]*\)[^.:;(]*\.(?= |$)")  # a sentence that only points to a page
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
SOURCE = re.compile(r"(?:\[\w+\.py\]\([^)]*\)(?:, )?)+")  # links to source files
ERRATUM = r"\[E\d+\]\([^)]*\)"
ERRATA = re.compile(rf"(?<=[.)]) {ERRATUM}(?:, {ERRATUM})*\.?|^All under {ERRATUM}:|,?(?: see)? ?{ERRATUM}")
EMPTY = re.compile(r"\s*\((?:\s|[,;.]|see)*\)")
LABEL = re.compile(r"\*\*(\([\w.]+\))\*\*(?: ?\((?:definition|property)\))?\s*")  # of an equation
ASIDE = re.compile(r"\s*\([^()`]*`test_[^()]*\)")  # a test in parentheses


def plain_page(markdown: str) -> str:
    """The page as lines of at most WIDTH characters; formulas are indented lines of their own."""
    text = re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)
    blocks = re.split(r"\n\s*\n", text)
    shown = [part for part in (_block(one) for one in _kept(blocks)) if part]
    return "\n\n".join(shown)


def _kept(blocks: list[str]) -> Iterator[str]:
    """The blocks without the sections that are left out, and without matrices that are drawn out with what says so."""
    out: list[str] = []
    before, dropped = "", False
    for block in blocks:
        heading = re.match(r"#+ (.*)", block)
        if heading:
            dropped = heading[1] in LEFT_OUT and block is not blocks[0]
        if dropped:
            continue
        if block.startswith("$$") and r"\vdots" in block:
            if out and out[-1] == before:
                out.pop()
            continue
        out.append(block)
        before = block
    yield from out


def _block(block: str) -> str:
    """One heading, paragraph, formula, table or list."""
    block = block.strip("\n")
    if block.startswith("#"):
        title = _prose(block.lstrip("# "))
        return f"{title}\n{('=' if block.startswith('# ') else '-') * len(title)}"
    if block.startswith("```"):
        return textwrap.indent("\n".join(block.split("\n")[1:-1]), "    ")
    if block.startswith("$$"):
        return f"    {plain_formula(block.strip().strip('$'))}"
    if block.startswith("|"):
        return _table(block.split("\n"))
    if re.match(r"(- |\d+\. )", block):
        items = re.split(r"\n(?=- |\d+\. )", block)
        return "\n".join(line for item in items for line in _item(item))
    return "\n".join(wrapped(_prose(block)))


def _item(text: str) -> list[str]:
    prose = _prose(text)
    return textwrap.wrap(prose, WIDTH, subsequent_indent="  ") if prose.strip("- ") else []


def _table(rows: list[str]) -> str:
    """The rows with aligned columns, if that fits; else each row with its cells one behind the other."""
    cells = [[_prose(cell) for cell in row.strip()[1:-1].split("|")] for row in rows]
    cells = [row for row in cells if not all(re.fullmatch(r":?-+:?", cell) for cell in row) and any(row)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=False)]
    if sum(widths) + 2 * len(widths) <= WIDTH:
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in cells]
        return "\n".join(f"  {line}".rstrip() for line in lines)
    lines = ["; ".join(filter(None, row)) for row in cells]
    return "\n".join(line for row in lines for line in textwrap.wrap(f"- {row}", WIDTH, subsequent_indent="    "))


def _prose(text: str) -> str:
    """One paragraph without links, tests and marks of emphasis, its formulas as text."""
    text = " ".join(text.split())
    text = re.sub(r'<a id="[^"]*"></a>', "", text)
    text = re.sub(rf"Source: {SOURCE.pattern}[.;]?|{SOURCE.pattern}", "", text)
    text = ASIDE.sub("", EMPTY.sub("", ERRATA.sub("", text)))
    if "`test_" in text:
        text = " ".join(one for one in re.split(r"(?<=[.!?])\s+(?=[A-Z`(])", text) if "`test_" not in one)
    text = LINK.sub(r"\1", LINK_ALONE.sub("", text))
    pieces = re.split(r"(`[^`]*`|\$[^$]+\$)", text)
    return re.sub(r" +(?=[.,;:]( |$))|(?<= ) +", "", "".join(map(_piece, pieces))).strip()


def _piece(piece: str) -> str:
    """Code as it is, a formula as text, and words without emphasis."""
    if piece.startswith("`"):
        return piece.strip("`")
    if piece.startswith("$"):
        return plain_formula(piece.strip("$"))
    piece = re.sub(
        r"\*\*(\([\w.]+\))\*\*(?: ?\((?:definition|property)\))?\s*(?=:)?", r"\1 ", piece
    )  # the label of an equation
    return re.sub(r"\*+", "", piece)
