"""What takes long before the first step of a run and after its last one: said when it begins, shown while it lasts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from onfoot.data.count import Count
from onfoot.terminal import for_terminal
from onfoot.train.progress import PLAIN_EVERY, duration

WORKING_EVERY = 0.5  # seconds between updates of the line that says how much is done

# The command line shows its messages. A record may have a `count`.
logger = logging.getLogger("onfoot.start")
logger.addHandler(logging.NullHandler())


def announce(what: str, count: Count | None = None) -> None:
    """Says what begins now, and which count tells how much of it is done."""
    logger.info("%s", what, extra={"count": count})


class Working:
    """Shows what takes long: a line when it begins, and below it how much is done and for how long already.

    On a terminal that line keeps changing; elsewhere there is one every 10 seconds. A thread writes it, so the
    work itself only counts.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(highlight=False)
        self._clock, self._lock, self._over = clock, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._count: Count | None = None
        self._begin = self._last_line = clock()
        self._live: Live | None = None  # the line that changes, while it is shown

    def __enter__(self) -> Working:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._hide()

    def begin(self, what: str, count: Count | None = None) -> None:
        """Prints what begins now."""
        with self._lock:
            self._hide()
            self._print(what)
            self._count = count
            self._begin = self._last_line = self._clock()

    def tick(self) -> None:
        """Shows how much is done."""
        with self._lock:
            now = self._clock()
            counted = f"{self._count}, " if self._count is not None and self._count.done else ""
            text = f"  {counted}{duration(now - self._begin)} so far"
            if self.console.is_interactive:
                if self._live is None:
                    self._live = Live(console=self.console, auto_refresh=False, transient=True)
                    self._live.start()
                self._live.update(Text(text, "dim", no_wrap=True, overflow="ellipsis"), refresh=True)
            elif now - self._last_line >= PLAIN_EVERY:
                self._last_line = now
                self._print(text)

    def _watch(self) -> None:
        with suppress(OSError, ValueError):  # nobody reads the output any more
            while not self._over.wait(WORKING_EVERY):
                self.tick()

    def _print(self, text: str) -> None:
        self.console.print(Text(for_terminal(text, self.console.file), "dim"), soft_wrap=True)

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
