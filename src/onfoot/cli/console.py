"""Prints tables to a terminal, to a pipe and as Markdown.

In a pipe nothing is truncated or wrapped: the console is as wide as its content and has no colours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from onfoot.terminal import for_terminal, printable


@dataclass
class Sheet:
    """A table: column headings ("name" aligns left, ">name" right), rows of text, and notes below it."""

    title: str
    columns: list[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    section_ends: set[int] = field(default_factory=set)  # indices of rows followed by a gap
    emphasised: set[int] = field(default_factory=set)  # indices of rows in bold
    narrow: Sheet | None = None  # shown instead if this table is wider than the terminal


def show(table: Table) -> None:
    """Prints a table; if the output is not a terminal, at full width and without trailing spaces."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    console = Console(highlight=False, color_system=None, width=_width(table))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _width(table: Table) -> int:
    """The width of the table without wrapping."""
    return max(1, Console(width=10_000).measure(table).maximum)


def show_text(text: Text | str, style: str = "") -> None:
    """Prints text unchanged: no markup (formulas contain [brackets]), no wrapping."""
    shown = Text(for_terminal(text), style=style) if isinstance(text, str) else text
    Console(highlight=False).print(shown, soft_wrap=True)


def show_json(value: Any) -> None:
    """Prints JSON without escaping non-ASCII letters such as Δ."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1))


def show_sheet(sheet: Sheet) -> None:
    """Prints a sheet: title, table, notes."""
    console, out = Console(), _table(sheet)
    if sheet.narrow is not None and console.is_terminal and _width(out) > console.width:
        out = _table(sheet.narrow)
    show_text(f"\n{sheet.title}\n", "bold cyan")
    show(out)
    for note in sheet.notes:
        show_text(f"  {note}", "dim")


def _table(sheet: Sheet) -> Table:
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in sheet.columns:
        right = column.startswith(">")
        header = Text(column.removeprefix(">"))  # a Text, because [brackets] in a str are markup
        out.add_column(header, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for i, row in enumerate(sheet.rows):
        cells = (Text(printable(cell)) for cell in row)
        out.add_row(*cells, style="bold" if i in sheet.emphasised else None, end_section=i in sheet.section_ends)
    return out


def markdown(sheet: Sheet) -> str:
    """The sheet as a Markdown table with its title as a heading."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    head = [column.removeprefix(">") for column in sheet.columns]
    rules = ["---:" if column.startswith(">") else "---" for column in sheet.columns]
    body = [
        line([f"**{cell}**" if cell and i in sheet.emphasised else cell for cell in row])
        for i, row in enumerate(sheet.rows)
    ]
    notes = [f"- {note}" for note in sheet.notes]
    return "\n".join([f"### {sheet.title}", "", line(head), line(rules), *body, "", *notes, ""])
