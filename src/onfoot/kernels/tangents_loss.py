"""The tangents of the fused head and loss, one part of the tokens at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.kernels import logits_loss
from onfoot.kernels.buffers import empty
from onfoot.kernels.cross_entropy import as_array, checked_targets, total
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import kernel
from onfoot.kernels.linear import affine, input_gradient, sum_rows
from onfoot.kernels.logits_loss import rows_per_part
from onfoot.kernels.product import product
from onfoot.kernels.shapes import as_rows, thread_range
from onfoot.kernels.simd import address, greatest
from onfoot.kernels.update import add
from onfoot.ops.cross_entropy import IGNORE


@kernel("f4[:,::1], f4[:,::1], i8[::1], f8[::1], f8[::1], f8[::1]", "n v, n v, n, ., n, n")
def _losses(
    logits: np.ndarray,
    logits_dot: np.ndarray,
    targets: np.ndarray,
    divisor: np.ndarray,
    losses: np.ndarray,
    dots: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Each token's loss, and its tangent over the divisor; logits and their tangent become their gradient and its."""
    first, last = thread_range(logits.shape[0], 1, thread, threads)
    scale = F(1 / divisor[0])
    for i in range(first, last):
        row, moved, target = logits[i], logits_dot[i], targets[i]
        losses[i] = dots[i] = 0.0
        if target == IGNORE:
            row[:] = 0
            moved[:] = 0
            continue
        top, hit, hit_dot = greatest(address(row), row.size), row[target], moved[target]
        sum_, side = F(0), F(0)
        for j in range(row.size):
            row[j] = exp(row[j] - top)
            sum_ += row[j]
            side += row[j] * moved[j]
        losses[i] = np.float64(np.log(sum_) + top) - np.float64(hit)  # eq CE.1
        side /= sum_
        dots[i] = (np.float64(side) - np.float64(hit_dot)) / divisor[0]  # eq CE.3
        share = scale / sum_
        for j in range(row.size):
            row[j] *= share
            moved[j] = row[j] * (moved[j] - side)  # eq CE.4
        row[target] -= scale  # eq CE.2


def logits_loss_tangents(
    x: tuple[Any, Any],
    weight: tuple[Any, Any],
    bias: tuple[Any, Any],
    targets: Any,
    divisor: Any,
    trains: bool,
    kind: str,
    gradients: bool = True,
) -> tuple[Any, Any, Any, Any, Any]:
    """The fused head and loss, some tokens at a time; each argument is (array, tangent), the weight (V, C).

    Returns the loss, each token's derivative (N,), and the gradients of x, weight and bias with their tangents.

    Without `gradients`, that of the weight is not computed. For "gauss-newton", the tangents are the ordinary gradients
    of the head for the tangent of the logits' gradient.
    """
    left, left_dot = (as_rows(a) for a in x)
    w, w_dot = weight
    vocabulary, width = w.shape
    target, over = checked_targets(targets, vocabulary), as_array(divisor)
    n, curved = left.shape[0], kind == "hessian"
    losses, dots = empty((n,), np.float64), empty((n,), np.float64)
    dx: Any = empty((n, width)) if curved else None
    dx_dot = empty((n, width))
    dweight = empty(w.shape) if trains and curved and gradients else None
    dweight_dot = empty(w.shape) if trains else None
    dbias: Any = None
    dbias_dot: Any = None
    size = rows_per_part(n, 2 * vocabulary, trains)
    logits, logits_dot = empty((size, vocabulary)), empty((size, vocabulary))
    for a in range(0, n, size):
        rows, rows_dot = left[a : a + size], left_dot[a : a + size]
        d, d_dot = logits[: rows.shape[0]], logits_dot[: rows.shape[0]]
        affine(rows, w.T, bias[0], out=d)
        affine(rows_dot, w.T, bias[1], out=d_dot)
        if w_dot is not None:
            product(rows, w_dot.T, out=d_dot, accumulate=True)
        _losses(d, d_dot, target[a : a + size], over, losses[a : a + size], dots[a : a + size])
        to = dx_dot[a : a + size]
        input_gradient(d_dot, w.T, out=to)
        if curved:
            input_gradient(d, w.T, out=dx[a : a + size])
            if w_dot is not None:
                product(d, w_dot, out=to, accumulate=True)
        if not trains:
            continue
        product(d_dot.T, rows, out=dweight_dot, accumulate=a > 0)
        if curved:
            product(d.T, rows_dot, out=dweight_dot, accumulate=True)
        if dweight is not None:
            product(d.T, rows, out=dweight, accumulate=a > 0)
        if bias[0] is not None:
            one, one_dot = sum_rows(d), sum_rows(d_dot)
            dbias = one if dbias is None else add(dbias, one)
            dbias_dot = one_dot if dbias_dot is None else add(dbias_dot, one_dot)
    shape = x[0].shape
    dx = dx.reshape(shape) if curved else None
    loss = total(losses, over)
    return loss, dots, (dx, dx_dot.reshape(shape)), (dweight, dweight_dot), (dbias, dbias_dot)


KERNELS = (*logits_loss.KERNELS, _losses)
