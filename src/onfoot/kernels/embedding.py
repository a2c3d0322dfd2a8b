"""Embedding: rows of a table by id, and the sum of the gradients of each row.

In the backward pass the threads divide the columns, not the ids: two threads never write to the same row, and every sum
has the same order for any number of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import quantized
from onfoot.kernels.buffers import empty
from onfoot.kernels.jit import kernel
from onfoot.kernels.shapes import ARRAYS, as_rows, contiguous, fall_back_to_formula, is_float32, thread_range
from onfoot.quantized import FrozenWeight
from onfoot.recording.recorded_array import RecordedArray


class EmbeddingKernelSaved(NamedTuple):
    ids: np.ndarray
    n_rows: int


@kernel("i8[::1], f4[:,::1], f4[:,::1]", "n, v c, n c")
def _gather(ids: np.ndarray, weight: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
    a, e = thread_range(ids.size, 1, thread, threads)
    for i in range(a, e):
        row, out = weight[ids[i]], y[i]
        for j in range(out.size):
            out[j] = row[j]  # eq 2


@kernel("f4[:,::1], i8[::1], f4[:,::1], b1", "n c, n, v c")
def _scatter(dy: np.ndarray, ids: np.ndarray, total: np.ndarray, fresh: bool, thread: int, threads: int) -> None:
    a, e = thread_range(dy.shape[1], 16, thread, threads)
    if fresh:
        total[:, a:e] = 0
    for i in range(ids.size):
        row, up = total[ids[i], a:e], dy[i, a:e]
        for j in range(e - a):
            row[j] += up[j]  # eq 3


def _names_rows(ids: Any, n_rows: int) -> bool:
    """Whether the kernels support these ids: int64, each a valid row."""
    whole = type(ids) in ARRAYS and ids.dtype == np.int64 and ids.size > 0
    if type(ids) is RecordedArray:
        return whole  # a replay's ids are checked before it
    return whole and bool(ids.view(np.uint64).max() < n_rows)  # as unsigned, negative ids are large


def embedding_forward(ids: np.ndarray, weight: Any) -> tuple[np.ndarray, Any]:
    """y = ohe(ids) w: the row of `weight` for each id."""
    blocks = isinstance(weight, FrozenWeight)
    if not (blocks or is_float32(weight)) or weight.ndim != 2 or not _names_rows(ids, weight.shape[0]):
        return fall_back_to_formula(ops.embedding_forward, ids, weight)
    y = empty((*ids.shape, weight.shape[1]))
    flat = contiguous(ids).reshape(-1)
    if blocks:
        quantized.gathered(flat, weight, as_rows(y))
    else:
        _gather(flat, contiguous(weight), as_rows(y))
    return y, EmbeddingKernelSaved(ids, weight.shape[0])


def _takes(dy: Any, saved: Any) -> bool:
    """Whether the kernels support this gradient: one row per id, and valid ids."""
    known = (
        isinstance(saved, EmbeddingKernelSaved)
        and is_float32(dy)
        and dy.ndim > 0
        and dy.size == saved.ids.size * dy.shape[-1]
    )
    return known and _names_rows(saved.ids, saved.n_rows)


def embedding_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """The gradient of weight. If an id occurs twice, both rows are added."""
    if not _takes(dy, saved):
        return fall_back_to_formula(ops.embedding_backward, dy, saved)
    total = empty((saved.n_rows, dy.shape[-1]))
    _scatter(as_rows(dy), contiguous(saved.ids).reshape(-1), total, True)
    return total


def embedding_add_backward(dy: np.ndarray, saved: Any, total: np.ndarray) -> None:
    """Adds the gradient of weight to `total` in place; only the rows that were used are touched."""
    matching = _takes(dy, saved) and is_float32(total) and total.shape == (saved.n_rows, dy.shape[-1])
    if not (matching and total.flags.carray):
        if type(total) is not np.ndarray:
            raise TypeError(f"total must be an array, got {type(total).__name__}")
        total += embedding_backward(dy, saved)
    else:
        _scatter(as_rows(dy), contiguous(saved.ids).reshape(-1), total, False)


KERNELS = (*quantized.KERNELS, _gather, _scatter)
