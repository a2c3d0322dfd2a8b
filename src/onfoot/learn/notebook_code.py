"""The Python code in a notebook."""

from __future__ import annotations

import json
import re
from typing import Any

CHECK = "onfoot-check"  # the tag of a cell that checks; it is not part of the exercise
NOT_CODE = re.compile(r"[%!?]|\s*(import onfoot\b|from onfoot\b|onfoot\.learn\.)")  # magics, and calls of the check


def code_of(text: bytes | str) -> str:
    """The code cells of a notebook, one after the other; raises a ValueError if it is not one.

    Cells with the tag of a check are left out. Lines that only notebooks understand, and those that call the check,
    become comments.
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
    whole = lines[0].lstrip().startswith("%%")
    return "\n".join(f"# {line}" if whole or NOT_CODE.match(line) else line for line in lines)
