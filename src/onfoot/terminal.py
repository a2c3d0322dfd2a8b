"""Text of files and models on a terminal: what would steer it is made visible."""

from __future__ import annotations

import re
import sys
from typing import IO

# Control characters but for tabs and line ends, marks that change the direction of writing, halves of characters.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with what would steer a terminal made visible: ESC is \\x1b, a mark that turns a line round \\u202e."""
    return STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


def for_terminal(text: str, stream: IO[str] | None = None) -> str:
    """Text of a model as it may go to a stream: into a pipe or a file as it is, to a terminal without control codes."""
    return printable(text) if (stream or sys.stdout).isatty() else text
