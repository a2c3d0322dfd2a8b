"""Work that takes a while: how far it is, and how it is stopped.

A computation calls `progress` between two passes. That says how far it is, and ends it if its job was stopped: by a
button of the page, by a newer request, or because the page was closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
WAIT = 0.1  # seconds between two looks at a lock


class StoppedError(Exception):
    """The job was stopped; what it has computed so far is dropped."""


class Job:
    """One request that is being answered."""

    def __init__(self) -> None:
        self.what, self.done, self.total = "", 0, 0
        self.begun = time.monotonic()
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "done": self.done,
            "total": self.total,
            "seconds": round(time.monotonic() - self.begun, 1),
        }


current: ContextVar[Job | None] = ContextVar("current job", default=None)


def progress(what: str, done: int, total: int) -> None:
    """Says how far this job is; raises StoppedError if it was stopped. Without a job, does nothing."""
    job = current.get()
    if job is not None:
        job.check()
        job.what, job.done, job.total = what, done, total


def tracked(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, with progress before each."""
    for i, item in enumerate(items):
        progress(what, i, len(items))
        yield item


@contextmanager
def held(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock; a job that is stopped while it waits does not get it."""
    while not lock.acquire(timeout=WAIT):
        job = current.get()
        if job is not None:
            job.check()
    try:
        yield
    finally:
        lock.release()
