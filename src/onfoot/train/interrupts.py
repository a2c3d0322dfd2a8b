"""Delays Ctrl-C until the current step is complete, so that it never interrupts an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yields a function that is True after Ctrl-C or SIGTERM; a second one raises KeyboardInterrupt at once."""
    requested = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def delay_interrupt(busy: Callable[[], bool]) -> Iterator[None]:
    """Delays Ctrl-C to the end of the block while `busy()` is True; a second one acts at once.

    Only Python's default handler is replaced; a handler that the caller has installed stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending or not busy():
            raise KeyboardInterrupt
        pending = True

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
