"""Tables on the terminal, in a pipe and in Markdown.

In a pipe nothing is cut or folded: the console is made as wide as what it prints, and has no colours.
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
    """A table to show: columns ("name" is set left, ">name" right), rows of text, and lines to read below it."""

    title: str
    columns: list[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    section_ends: set[int] = field(default_factory=set)  # rows with a gap below them
    emphasised: set[int] = field(default_factory=set)
    narrow: Sheet | None = None  # what to show instead where this is wider than the terminal


def show(table: Table) -> None:
    """Prints a table; where the output is no terminal, as wide as it comes and without padding at the line ends."""
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
    """The width that the table has where nothing is folded."""
    return max(1, Console(width=10_000).measure(table).maximum)


def show_text(text: Text | str, style: str = "") -> None:
    """Prints text as it is: no markup (formulas hold [brackets]), no line broken."""
    shown = Text(for_terminal(text), style=style) if isinstance(text, str) else text
    Console(highlight=False).print(shown, soft_wrap=True)


def show_json(value: Any) -> None:
    """Prints JSON; letters such as Δ stay as they are."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1))


def show_sheet(sheet: Sheet) -> None:
    """Prints a sheet as a table with its title above and its notes below."""
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
        header = Text(column.removeprefix(">"))  # a Text, for a str's [brackets] would be read as markup
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
