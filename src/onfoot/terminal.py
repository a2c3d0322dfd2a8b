"""What is shown to people: text without control characters in a terminal, reports as small tables in a notebook."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import IO

# Control characters except tab and newline, bidirectional marks and line separators, lone surrogates.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

PLAIN = re.compile(r"[\w@+=:,./\\-]+")  # words that Windows' shells need no quotes for


def printable(text: str) -> str:
    """The text with control characters escaped: ESC becomes \\x1b, a right-to-left override \\u202e."""
    return UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def for_terminal(text: str, stream: IO[str] | None = None) -> str:
    """The text to write to a stream (default: stdout): escaped for a terminal, unchanged for a pipe or a file."""
    return printable(text) if (stream or sys.stdout).isatty() else text


def shell_word(text: str | Path, system: str = os.name) -> str:
    """A path or a text as one word of a command to paste: Windows' cmd.exe does not know single quotes."""
    text = str(text)
    if system != "nt":
        return shlex.quote(text)
    if PLAIN.fullmatch(text):
        return text
    doubled = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    return f'"{doubled}"'


def listed(names: Sequence[str]) -> str:
    """“a”, “a and b”, “a, b and c”."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def html_table(rows: Sequence[Sequence[str]], header: bool = False) -> str:
    """Rows of cells as an HTML table; with `header`, the first row is its head."""
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if header and i == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


class Shown:
    """A result with a repr of one line, and in notebooks a table. Dataclasses that inherit it have repr=False."""

    def facts(self) -> Mapping[str, str]:
        """What the repr says, by name."""
        raise NotImplementedError

    def tables(self) -> list[list[list[str]]]:
        """The tables that a notebook shows below the facts, each with a head."""
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name} {value}' for name, value in self.facts().items())})"

    def _repr_html_(self) -> str:
        facts = [[name, value] for name, value in self.facts().items()]
        return html_table(facts) + "".join(html_table(rows, header=True) for rows in self.tables())


class ShownText(Shown):
    """A report whose text is its table."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(printable(str(self)))}</pre>"
