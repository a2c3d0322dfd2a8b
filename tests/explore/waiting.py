"""Waits for a condition in the page by polling: its Content-Security-Policy forbids wait_for_function's eval."""

from __future__ import annotations

import time
from typing import Any

SHOWN = "[...document.querySelectorAll('.detail > .pair .answer')].every(x => x.querySelector('output'))"
VIEWS = ("map", "attention", "training", "step", "live", "whatif", "mistakes")


def until(page: Any, expression: str, arg: Any = None, seconds: float = 30) -> None:
    """Polls the page until the expression is true; `x` in it is `arg`."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(f"(x) => {{ return Boolean({expression}); }}", arg):
        assert time.monotonic() < deadline, f"timed out waiting for: {expression}"
        time.sleep(0.05)


def settled(page: Any) -> None:
    """Waits until the view and its numbers are shown."""
    page.wait_for_selector("main[aria-busy=false]")
    until(page, f"{SHOWN} && !document.querySelector('[aria-busy=true]')", seconds=60)


def open_view(page: Any, view: str) -> None:
    page.locator(f"#tab-{view}").click()
    settled(page)


MARK_IS_SEEN = """(([mark, bar, tour]) =>
    mark.top >= 0 && (mark.bottom <= bar.top || mark.top >= bar.bottom)  // the bar of tabs stays at the top
    && (mark.bottom <= tour.top || (mark.height > tour.top - bar.bottom - 24 && mark.top < bar.bottom + 20))
)(['.tour-spot', '.view-bar', '.tour'].map(one => document.querySelector(one).getBoundingClientRect()))"""


def mark_seen(page: Any) -> None:
    """Waits until what a stop of the tour marks is under no bar; of what is too tall, the top."""
    settled(page)
    until(page, MARK_IS_SEEN, seconds=10)
