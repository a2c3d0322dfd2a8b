"""Waiting for a page without a line of script in it: its policy forbids what is evaluated from a string."""

from __future__ import annotations

import time
from typing import Any

SHOWN = "[...document.querySelectorAll('.detail > .pair .answer')].every(x => x.querySelector('output'))"


def until(page: Any, expression: str, arg: Any = None, seconds: float = 30) -> None:
    """Asks the page until the expression holds; `x` in it is `arg`."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(f"(x) => {{ return Boolean({expression}); }}", arg):
        assert time.monotonic() < deadline, f"still not so: {expression}"
        time.sleep(0.05)
