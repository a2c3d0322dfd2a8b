"""The Python code in a notebook."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

CHECK = "onfoot-check"  # the tag of a cell that checks; it is not part of the exercise
CALLS_CHECK = re.compile(r"\s*(import onfoot\b|from onfoot\b|onfoot\.learn\.)")
# %time f(), !ls, ?f, f? and x = !ls, also indented
MAGIC = re.compile(r"\s*(%{1,2}[A-Za-z]|[!?]|[\w.]+\?{1,2}\s*$|[\w, ]+=\s*(!|%[A-Za-z]))")


def code_of(text: bytes | str) -> str:
    """The code cells of a notebook, one after the other; raises a ValueError if it is not one.

    Cells with the tag of a check are left out. Lines that only notebooks understand, and those that call the check,
    become comments; an indented one also `pass`, which its block may need.
    """
    try:
        cells = json.loads(text)["cells"]
        sources = [_source(cell) for cell in cells if cell["cell_type"] == "code" and not _is_check(cell)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected the cells of a notebook in format 4 ({type(error).__name__})") from None
    return "\n\n".join(sources) + "\n"


def _is_check(cell: dict[str, Any]) -> bool:
    return CHECK in cell.get("metadata", {}).get("tags", [])


def _source(cell: dict[str, Any]) -> str:
    """The source of a cell; `%%bash` and other cell magics make the whole cell a comment."""
    source = cell["source"]
    lines = (source if isinstance(source, str) else "".join(source)).split("\n")
    if lines[0].lstrip().startswith("%%"):
        return "\n".join(f"# {line}" for line in lines)
    magic = not _is_python(lines)
    return "\n".join(
        _comment(line) if CALLS_CHECK.match(line) or (magic and MAGIC.match(line)) else line for line in lines
    )


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _comment(line: str) -> str:
    code = line.lstrip()
    indent = line[: len(line) - len(code)]
    return f"{indent}pass  # {code}" if indent else f"# {line}"
