"""Finds the line of a user's code that writes into its arguments, by comparing them at every line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np

from onfoot.check.isolated import place

MOST_ENTRIES = 20_000  # of the arguments; comparing larger ones at every line takes too long


def writing_line(run: Callable[[], Any], arrays: Sequence[np.ndarray]) -> str:
    """Calls `run` and returns the file and line after which one of the arrays first had other values, or ""."""
    if sum(x.size for x in arrays) > MOST_ENTRIES:
        return ""
    before, found = [x.tobytes() for x in arrays], list[tuple[str, int]]()
    last: list[tuple[str, int]] = []  # the line that was run last, of those that are not Python's or a package's

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if found:
            return None
        if last and any(x.tobytes() != old for x, old in zip(arrays, before, strict=True)):
            found.append(last[0])
            return None
        here = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place([here]):
            last[:] = [here]
        return trace

    own = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(own)
    return place(found)
