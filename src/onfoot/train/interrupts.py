"""When Ctrl-C acts: between the steps of a run, and never in the middle of an update."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a question that the loop asks; a second one acts at once."""
    asked = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def held_back(busy: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C acts at once as long as nothing is `busy`, and otherwise at the end; a second one acts at once.

    Only Python's own handler is replaced: whoever has one of his own knows what he does.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked or not busy():
            raise KeyboardInterrupt
        asked = True

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked:
        raise KeyboardInterrupt
