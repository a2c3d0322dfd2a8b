"""A batch, and each rank's share of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    tokens: np.ndarray  # (B, T)
    targets: np.ndarray  # (B, T)
    segments: np.ndarray | None = None  # (B, T)


NO_EXAMPLE = -1  # the number of padding


class Share(NamedTuple):
    """One rank's share of rows."""

    rank: int = 0
    size: int = 1

    def of(self, n: int) -> range:
        """This rank's contiguous part of n rows; the parts of any two ranks differ by at most 1 row."""
        each, extra = divmod(n, self.size)
        begin = self.rank * each + min(self.rank, extra)
        return range(begin, begin + each + (self.rank < extra))

    def pieces(self, n: int, max_rows: int) -> list[range]:
        """This rank's part of n rows in as few pieces of at most `max_rows` as possible, of nearly equal length."""
        rows = self.of(n)
        count = -(-len(rows) // max_rows)
        parts = [Share(i, count).of(len(rows)) for i in range(count)]
        return [rows[part.start : part.stop] for part in parts]


ALL = Share()


class Place(NamedTuple):
    """Where a step's rows begin in the endless shuffled sequence of rows."""

    step: int = 0  # since the last change of the number of rows per step
    row: int = 0  # the first row of that step

    def of(self, step: int, n: int) -> int:
        """The first row of a step, with n rows per step."""
        return self.row + (step - self.step) * n


FIRST = Place()


def place(sizes: Sequence[tuple[int, int]]) -> Place:
    """The place after the last change of the rows per step, from (first step, rows per step) of each part of a run."""
    out, n = FIRST, sizes[0][1]
    for step, rows in sizes[1:]:
        if rows != n:
            out, n = Place(step, out.of(step, n)), rows
    return out
