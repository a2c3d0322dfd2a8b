"""Escapes control characters in text from files and models before it is printed to a terminal."""

from __future__ import annotations

import re
import sys
from typing import IO

# Control characters except tab and newline, bidirectional marks and line separators, lone surrogates.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters escaped: ESC becomes \\x1b, a right-to-left override \\u202e."""
    return UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def for_terminal(text: str, stream: IO[str] | None = None) -> str:
    """The text to write to a stream (default: stdout): escaped for a terminal, unchanged for a pipe or a file."""
    return printable(text) if (stream or sys.stdout).isatty() else text
