"""The figures of docs/errata.md: computed, formatted, and written between the page's markers."""

from __future__ import annotations

import re
from pathlib import Path

from errata.catalogue import CATALOGUE
from errata.registry import Erratum, Line

PAGE = Path(__file__).parents[2] / "docs" / "errata.md"
AGREES = 1e-10  # below this two float64 results agree; the digits beneath differ between machines

BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n)(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)


def shown(value: float | int | str) -> str:
    """A measured value as the page has it: two significant digits, or "≤ 1e-10"."""
    if isinstance(value, float):
        return f"≤ {AGREES:.0e}" if value <= AGREES else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) else value


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def headline(erratum: Erratum) -> Line:
    """The line that stands for an erratum in the overview: its first error, or its first line where it has none."""
    lines = erratum.measure()
    return next((line for line in lines if isinstance(line.literal, float)), lines[0])


def overview() -> str:
    rows = [row("", "kind", "place", "in a line", "literal", "right"), "|---|---|---|---|---|---|"]
    for one in CATALOGUE:
        line = headline(one)
        link = f"[{one.id}](#{one.anchor})"
        rows.append(row(link, one.kind, one.place, one.title, shown(line.literal), shown(line.right)))
    return "\n".join(rows)


def measurements(erratum: Erratum) -> str:
    rows = [row("measured", "literal", "right"), "|---|---|---|"]
    rows += [row(line.what, shown(line.literal), shown(line.right)) for line in erratum.measure()]
    return "\n".join(rows)


def refreshed(text: str) -> str:
    """The page with every figure computed anew."""
    tables = {one.anchor: measurements(one) for one in CATALOGUE} | {"overview": overview()}
    return BLOCK.sub(lambda block: block[1] + "\n" + tables[block[2]] + "\n\n" + block[3], text)
