"""Fused softmax and cross-entropy, one row at a time: two passes forward, one backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.shapes import ARRAYS, as_rows, fall_back_to_formula, is_float32, thread_range
from onfoot.kernels.simd import address, greatest
from onfoot.ops.cross_entropy import IGNORE
from onfoot.recording.recorded_array import RecordedArray


class CrossEntropyKernelSaved(NamedTuple):
    logits: np.ndarray  # (N, V)
    lse: np.ndarray  # (N,), log Σ exp(logits)
    targets: np.ndarray  # (N,)
    divisor: np.ndarray
    shape: tuple[int, ...]  # of the logits


@inner
def log_sum_exp(row: np.ndarray) -> float:
    """log Σ exp(row), without overflow."""
    top = greatest(address(row), row.size)
    total = F(0)
    for j in range(row.size):
        total += exp(row[j] - top)
    return np.log(total) + top


@inner
def softmax_minus_target(row: np.ndarray, lse: float, target: int, scale: float, out: np.ndarray) -> None:
    """(y_pred − y_gt) scale; 0 if there is no target."""
    if target == IGNORE:
        out[:] = 0
        return
    for j in range(row.size):
        out[j] = exp(row[j] - lse) * scale
    out[target] -= scale  # eq CE.2


@kernel("f4[:,::1], i8[::1], f4[::1], f8[::1]", "n v, n, n, n")
def _forward(
    logits: np.ndarray, targets: np.ndarray, lse: np.ndarray, losses: np.ndarray, thread: int, threads: int
) -> None:
    a, e = thread_range(logits.shape[0], 1, thread, threads)
    for i in range(a, e):
        lse[i] = log_sum_exp(logits[i])
        losses[i] = 0.0
        if targets[i] != IGNORE:
            losses[i] = np.float64(lse[i]) - np.float64(logits[i, targets[i]])  # eq CE.1


@kernel("f4[:,::1], f4[::1], i8[::1], f8, f8[::1], f4[:,::1]", "n v, n, n, , ., n v")
def _backward(
    logits: np.ndarray,
    lse: np.ndarray,
    targets: np.ndarray,
    dloss: float,
    divisor: np.ndarray,
    dlogits: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(logits.shape[0], 1, thread, threads)
    scale = F(dloss / divisor[0])
    for i in range(a, e):
        softmax_minus_target(logits[i], lse[i], targets[i], scale, dlogits[i])


@kernel("f8[::1], f8[::1], f8[::1]")
def _total(losses: np.ndarray, divisor: np.ndarray, loss: np.ndarray, thread: int, threads: int) -> None:
    if thread == 0:
        total = 0.0
        for i in range(losses.size):
            total += losses[i]
        loss[0] = total / divisor[0]


def as_array(divisor: Any) -> np.ndarray:
    """The divisor as an array that a kernel reads: it changes from step to step."""
    return divisor if isinstance(divisor, np.ndarray) else np.array([divisor], np.float64)


def total(losses: np.ndarray, divisor: np.ndarray) -> Any:
    """Σ losses / divisor: a number, or while recording an array."""
    loss = empty((1,), np.float64)
    _total(losses, divisor, loss)
    return loss if type(loss) is RecordedArray else np.float32(loss[0])


def checked_targets(targets: np.ndarray, vocabulary: int) -> np.ndarray:
    """The targets flattened to int64, or an IndexError: a kernel would read out of bounds."""
    if type(targets) is RecordedArray:
        return targets.reshape(-1)  # a replay's targets are checked before it
    if type(targets) is not np.ndarray or targets.dtype.kind not in "iu":
        raise IndexError(f"targets must be an integer array, got {getattr(targets, 'dtype', type(targets).__name__)}")
    flat = np.ascontiguousarray(targets, dtype=np.int64).reshape(-1)
    wrong = (flat.view(np.uint64) >= vocabulary) & (flat != IGNORE)  # as unsigned, negative values are large
    if wrong.any():
        raise IndexError(f"target {flat[wrong][0]} is outside 0 ... {vocabulary - 1} and is not {IGNORE}")
    return flat


def targets_match(targets: Any, x: np.ndarray) -> bool:
    """Whether there is one target per row of x."""
    return type(targets) in ARRAYS and x.ndim > 0 and targets.size * x.shape[-1] == x.size


def cross_entropy_forward(logits: np.ndarray, targets: np.ndarray, divisor: float) -> tuple[np.float32, Any]:
    """L = Σ (log Σ exp a − a[target]) / divisor, over the tokens that have a target."""
    if not is_float32(logits) or not targets_match(targets, logits):
        return fall_back_to_formula(ops.cross_entropy_forward, logits, targets, divisor)
    flat = as_rows(logits)  # (N, V)
    target = checked_targets(targets, flat.shape[1])
    lse, losses, over = empty(target.shape), empty(target.shape, np.float64), as_array(divisor)
    _forward(flat, target, lse, losses)
    return total(losses, over), CrossEntropyKernelSaved(flat, lse, target, over, logits.shape)


def cross_entropy_backward(dloss: float, saved: Any) -> np.ndarray:
    """The gradient of the logits: (y_pred − y_gt)/divisor, 0 in rows without a target."""
    if not isinstance(saved, CrossEntropyKernelSaved):
        return ops.cross_entropy_backward(dloss, saved)
    logits, lse, target, divisor, shape = saved
    dlogits = empty(logits.shape)
    _backward(logits, lse, target, float(dloss), divisor, dlogits)
    return dlogits.reshape(shape)


KERNELS = (_forward, _backward, _total)
