"""Large arrays by overview and zoom: the largest entry and the mean of each block, and windows of the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore.describe import encoded

if TYPE_CHECKING:
    from onfoot.explore.study import Study

ROWS, COLUMNS = 48, 96  # blocks of an overview, at most
MAX_WINDOW = 65_536  # cells of a window


def edges(n: int, most: int) -> np.ndarray:
    """Where the blocks begin if n entries are divided into at most `most` blocks of nearly equal size."""
    parts = min(n, most)
    return np.arange(parts) * n // parts


def overview(value: np.ndarray) -> dict[str, Any]:
    """An array (rows, columns) as blocks: where they begin, the mean of each, and its largest entry with its sign."""
    table = np.atleast_2d(value)
    at = [edges(n, most) for n, most in zip(table.shape, (ROWS, COLUMNS), strict=True)]

    def reduced(function: np.ufunc) -> np.ndarray:
        return function.reduceat(function.reduceat(table, at[0], axis=0), at[1], axis=1)

    top, bottom = reduced(np.maximum), reduced(np.minimum)
    sizes = [np.diff(begin, append=n) for begin, n in zip(at, table.shape, strict=True)]
    return {
        "rows": at[0].tolist(),
        "columns": at[1].tolist(),
        "largest": encoded(np.where(np.abs(bottom) > top, bottom, top)),
        "mean": encoded(reduced(np.add) / np.outer(*sizes)),
    }


def overview_of(study: Study, query: Any) -> dict[str, Any]:
    """The overview of the array with that id."""
    return overview(study.tensors[query["id"]].value)


def window_of(study: Study, query: Any) -> dict[str, Any]:
    """A window of an array: its numbers from one row and column up to others."""
    table = np.atleast_2d(study.tensors[query["id"]].value)
    try:
        r0, r1, c0, c1 = (int(query[name]) for name in ("r0", "r1", "c0", "c1"))
    except ValueError:
        raise ValueError("r0, r1, c0 and c1 must be integers") from None
    rows, columns = table.shape
    if not (0 <= r0 < r1 <= rows and 0 <= c0 < c1 <= columns):
        raise ValueError(f"the window must be within {rows} × {columns}, got rows {r0} to {r1}, columns {c0} to {c1}")
    if (r1 - r0) * (c1 - c0) > MAX_WINDOW:
        raise ValueError(f"a window has at most {MAX_WINDOW:,} cells, got {(r1 - r0) * (c1 - c0):,}")
    return {"values": encoded(table[r0:r1, c0:c1])}
