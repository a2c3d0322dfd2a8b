"""Which buffers may lie in the same place: those that are not alive at the same time."""

from __future__ import annotations

import numpy as np

LINE = 64  # bytes; every buffer begins a cache line


def places(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each buffer begins in one arena, and how large that is.

    A buffer is alive from the call `first` to the call `last`, both included. The largest is placed first; each lies at
    the lowest place that is free as long as it lives.
    """
    count = len(sizes)
    rounded = (np.maximum(sizes, 1) + LINE - 1) // LINE * LINE
    begins, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    order = np.lexsort((first, -rounded))
    placed = np.zeros(count, np.int64)
    for n, one in enumerate(order):
        others = placed[:n]
        beside = others[(first[others] <= last[one]) & (last[others] >= first[one])]
        beside = beside[np.argsort(begins[beside], kind="stable")]
        free = np.maximum.accumulate(np.concatenate([[0], ends[beside]]))  # behind all that begin before
        room = np.flatnonzero(begins[beside] - free[:-1] >= rounded[one])
        begins[one] = free[room[0]] if len(room) else free[-1]
        ends[one] = begins[one] + rounded[one]
        placed[n] = one
    return begins, int(ends.max(initial=0))
