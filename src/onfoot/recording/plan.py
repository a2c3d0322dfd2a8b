"""Memory planning: buffers that are not alive at the same time may share memory."""

from __future__ import annotations

import numpy as np

LINE = 64  # bytes; every buffer starts on a cache line


def assign_offsets(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """The offset of each buffer in one arena, and the arena's size.

    A buffer is alive from the call `first` to the call `last`, both included. The largest is placed first; each gets
    the lowest offset that is free for its whole lifetime.
    """
    count = len(sizes)
    rounded = (np.maximum(sizes, 1) + LINE - 1) // LINE * LINE
    begins, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    order = np.lexsort((first, -rounded))
    placed = np.zeros(count, np.int64)
    for n, buffer in enumerate(order):
        others = placed[:n]
        overlapping = others[(first[others] <= last[buffer]) & (last[others] >= first[buffer])]
        overlapping = overlapping[np.argsort(begins[overlapping], kind="stable")]
        free = np.maximum.accumulate(np.concatenate([[0], ends[overlapping]]))  # the end of all that start before
        room = np.flatnonzero(begins[overlapping] - free[:-1] >= rounded[buffer])
        begins[buffer] = free[room[0]] if len(room) else free[-1]
        ends[buffer] = begins[buffer] + rounded[buffer]
        placed[n] = buffer
    return begins, int(ends.max(initial=0))
