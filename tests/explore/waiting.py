"""Waits for a condition in the page by polling: its Content-Security-Policy forbids wait_for_function's eval."""

from __future__ import annotations

import time
from typing import Any

SHOWN = "[...document.querySelectorAll('.detail > .pair .answer')].every(x => x.querySelector('output'))"


def until(page: Any, expression: str, arg: Any = None, seconds: float = 30) -> None:
    """Polls the page until the expression is true; `x` in it is `arg`."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(f"(x) => {{ return Boolean({expression}); }}", arg):
        assert time.monotonic() < deadline, f"timed out waiting for: {expression}"
        time.sleep(0.05)
