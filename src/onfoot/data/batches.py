"""A batch, and a rank's part of its rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
    tokens: np.ndarray  # (B, T)
    targets: np.ndarray  # (B, T)
    segments: np.ndarray | None = None  # (B, T)


class Share(NamedTuple):
    """One rank's part of anything that is counted in rows."""

    rank: int = 0
    size: int = 1

    def of(self, n: int) -> range:
        """This rank's rows of n: all ranks' parts, one behind the other, are all rows; no two differ by more than 1."""
        each, more = divmod(n, self.size)
        begin = self.rank * each + min(self.rank, more)
        return range(begin, begin + each + (self.rank < more))

    def pieces(self, n: int, most: int) -> list[range]:
        """This rank's rows of n in as few pieces of at most `most` as there can be, about equally long."""
        rows = self.of(n)
        count = -(-len(rows) // most)
        parts = [Share(i, count).of(len(rows)) for i in range(count)]
        return [rows[part.start : part.stop] for part in parts]


ALL = Share()
