"""Progress of a run: live on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from onfoot.terminal import for_terminal

PLAIN_EVERY = 10.0  # seconds between plain lines
NOTEBOOK_EVERY = 0.2  # seconds between updates of a notebook's bar, each of which is a message to the browser
DISPENSABLE = ("norm", "lr", "waiting", "clipped")  # left out, in this order, where the terminal is too narrow
SHORTEST_BAR = 8  # characters


class Reporter:
    """Shows the metrics of a run. `say` prints a separate line above the bar."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.total = total
        self._begin, self._first, self._last_line = time.monotonic(), done, 0.0
        self._bar: Progress | None = None
        self._notebook = NotebookBar() if self.console.is_jupyter else None
        if self.console.is_terminal and self._notebook is None:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
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
        """Shows the metrics after `step` steps. Plain lines: one every 10 seconds, or when forced."""
        if self._bar:
            room = self.console.width - len(f"step {self.total}/{self.total}") - SHORTEST_BAR - len("0:00:00") - 3
            self._bar.update(self._task, completed=step, figures=fitting(figures, room))
            return
        now, every = time.monotonic(), PLAIN_EVERY if self._notebook is None else NOTEBOOK_EVERY
        if force or now - self._last_line >= every or step == self.total:
            self._last_line = now
            rate = (now - self._begin) / max(step - self._first, 1)
            text = f"step {step}/{self.total}  {_line(figures)}  left {duration(rate * (self.total - step))}"
            if self._notebook is None:
                self.say(text)
            else:
                self._notebook.show(step, self.total, text)


class NotebookBar:
    """One output of a notebook's cell, which is updated in place."""

    def __init__(self) -> None:
        self._output: Any = None

    def show(self, step: int, total: int, text: str) -> None:
        from IPython.display import HTML, display

        bar = HTML(f'<progress value="{step}" max="{total}" style="width: 20em"></progress> {escape(text)}')
        if self._output is None:
            self._output = display(bar, display_id=True)
        else:
            self._output.update(bar)


def fitting(figures: dict[str, Any], width: int) -> str:
    """The metrics in a line of at most so many characters; the less important ones are left out if they must."""
    for name in DISPENSABLE:
        if len(_line(figures)) <= width:
            break
        figures = {other: value for other, value in figures.items() if other != name}
    return _line(figures)


def _line(figures: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items())


def duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    total = int(seconds)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"
