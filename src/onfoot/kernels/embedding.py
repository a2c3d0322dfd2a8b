"""Embedding: rows of a table by id, and the sum of what comes back to each row.

On the way back the threads divide the columns, not the ids: two tokens with the same id never meet in two threads,
and every sum has the same order however many threads there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.buffers import empty
from onfoot.kernels.jit import kernel
from onfoot.kernels.shapes import as_rows, contiguous, fits, share


class Saved(NamedTuple):
    ids: np.ndarray
    n_rows: int


@kernel("i8[::1], f4[:,::1], f4[:,::1]")
def _gather(ids: np.ndarray, weight: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
    a, e = share(ids.size, 1, thread, threads)
    for i in range(a, e):
        row, out = weight[ids[i]], y[i]
        for j in range(out.size):
            out[j] = row[j]  # eq 2


@kernel("f4[:,::1], i8[::1], f4[:,::1], b1")
def _scatter(dy: np.ndarray, ids: np.ndarray, total: np.ndarray, fresh: bool, thread: int, threads: int) -> None:
    a, e = share(dy.shape[1], 16, thread, threads)
    if fresh:
        total[:, a:e] = 0
    for i in range(ids.size):
        row, up = total[ids[i], a:e], dy[i, a:e]
        for j in range(e - a):
            row[j] += up[j]  # eq 3


def embedding_forward(ids: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = ohe(ids) w: the row of `weight` that each id names."""
    if not fits(weight) or ids.dtype != np.int64 or not ids.size or ids.view(np.uint64).max() >= weight.shape[0]:
        return ops.embedding_forward(ids, weight)
    y = empty((*ids.shape, weight.shape[1]))
    _gather(contiguous(ids).reshape(-1), contiguous(weight), as_rows(y))
    return y, Saved(ids, weight.shape[0])


def embedding_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """The gradient of weight. An id that occurs twice receives both its rows."""
    if not isinstance(saved, Saved) or not fits(dy):
        return ops.embedding_backward(dy, saved)
    total = empty((saved.n_rows, dy.shape[-1]))
    _scatter(as_rows(dy), contiguous(saved.ids).reshape(-1), total, True)
    return total


def embedding_add_backward(dy: np.ndarray, saved: Any, total: np.ndarray) -> None:
    """Adds the gradient of weight to `total`, in place: only the rows that were used are touched."""
    if not isinstance(saved, Saved) or not fits(dy, total) or not total.flags.c_contiguous:
        total += ops.embedding_backward(dy, saved)
    else:
        _scatter(as_rows(dy), contiguous(saved.ids).reshape(-1), total, False)


KERNELS = (_gather, _scatter)
