"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from onfoot.terminal import for_terminal

PLAIN_EVERY = 10.0  # seconds between plain lines


class Reporter:
    """Shows the metrics of a run. `say` prints a separate line above the bar."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.total = total
        self._begin, self._first, self._last_line = time.monotonic(), done, 0.0
        self._bar: Progress | None = None
        notebook = self.console.is_jupyter and find_spec("ipywidgets") is not None
        if self.console.is_terminal or notebook:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, figures="")

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()
        sys.stdout.flush()

    def say(self, text: str) -> None:
        self.console.print(for_terminal(text, self.console.file), markup=False, soft_wrap=True)

    def update(self, step: int, figures: dict[str, Any], force: bool = False) -> None:
        """Shows the metrics after `step` steps. Without a terminal: one line every 10 seconds, or when forced."""
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        if self._bar:
            self._bar.update(self._task, completed=step, figures=text)
            return
        now = time.monotonic()
        if force or now - self._last_line >= PLAIN_EVERY or step == self.total:
            self._last_line = now
            rate = (now - self._begin) / max(step - self._first, 1)
            self.say(f"step {step}/{self.total}  {text}  left {duration(rate * (self.total - step))}")


def duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    total = int(seconds)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"
