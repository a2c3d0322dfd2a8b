"""RMS norm: a row is read once from memory. x is kept, with each row's 1/r; the backward pass recomputes x/r."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import linear
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.layer_norm import BLOCK, HUGE, TINY
from onfoot.kernels.linear import sum_rows
from onfoot.kernels.product import NO_ROWS
from onfoot.kernels.shapes import as_rows, contiguous, fall_back_to_formula, is_float32, thread_range, upstream


class RMSNormKernelSaved(NamedTuple):
    x: np.ndarray  # (N, C)
    inverse: np.ndarray  # 1/r, (N,)
    weight: np.ndarray
    shape: tuple[int, ...]  # of x


@inner
def exact_inverse(row: np.ndarray, eps: float) -> float:
    """1/r of a row of very large or very small numbers, in float64."""
    squares = 0.0
    for j in range(row.size):
        squares += np.float64(row[j]) * np.float64(row[j])
    return F(1 / np.sqrt(squares / row.size + eps))


@kernel("f4[:,::1], f4[::1], f8, f4[:,::1], f4[::1]", "n c, c, , n c, n")
def _forward(
    x: np.ndarray, weight: np.ndarray, eps: float, y: np.ndarray, inverse: np.ndarray, thread: int, threads: int
) -> None:
    n, c = x.shape
    a, e = thread_range(n, BLOCK, thread, threads)
    for i in range(a, e):
        row, out = x[i], y[i]
        squares = F(0)
        for j in range(c):
            squares += row[j] * row[j]
        r = F(1) / np.sqrt(squares / F(c) + F(eps))  # eq RMS.1
        if not TINY < squares < HUGE:  # squares overflow or underflow in float32
            r = exact_inverse(row, eps)
        inverse[i] = r
        for j in range(c):
            out[j] = row[j] * r * weight[j]  # eq RMS.2


@kernel("f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[:,::1]", "n c, n c?, n c, n, c, n c, . c")
def _backward(
    dy: np.ndarray,
    dskip: np.ndarray,
    x: np.ndarray,
    inverse: np.ndarray,
    weight: np.ndarray,
    dx: np.ndarray,
    parts: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """dx, and the contribution of every BLOCK rows to dweight, for any number of threads."""
    n, c = x.shape
    first, last = thread_range(parts.shape[0], 1, thread, threads)
    for b in range(first, last):
        dw = parts[b]
        dw[:] = 0
        for i in range(b * BLOCK, min((b + 1) * BLOCK, n)):
            row, up, out, r = x[i], dy[i], dx[i], inverse[i]
            along = F(0)
            for j in range(c):
                normed = row[j] * r
                along += normed * (up[j] * weight[j])
                dw[j] += normed * up[j]  # eq RMS.4
            along /= F(c)
            for j in range(c):
                out[j] = (up[j] * weight[j] - row[j] * r * along) * r  # eq RMS.3
            if dskip.shape[0]:
                skip_gradient = dskip[i]
                for j in range(c):
                    out[j] += skip_gradient[j]


def rms_norm_forward(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, Any]:
    """y = (x/r) ∘ w with r = √(mean x² + eps), over the features of each token."""
    if not is_float32(x, weight) or not x.ndim or weight.shape != x.shape[-1:]:
        return fall_back_to_formula(ops.rms_norm_forward, x, weight, eps)
    rows, weight = as_rows(x), contiguous(weight)
    y, inverse = empty(rows.shape), empty((rows.shape[0],))
    _forward(rows, weight, eps, y, inverse)
    return y.reshape(x.shape), RMSNormKernelSaved(rows, inverse, weight, x.shape)


def rms_norm_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of x and weight."""
    if not isinstance(saved, RMSNormKernelSaved):
        return ops.rms_norm_backward(dy, saved)
    return _gradients(dy, saved, NO_ROWS)


def rms_norm_skip_backward(dy: np.ndarray, saved: Any, dskip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of x and weight; `dskip`, the gradient of the skip connection, is added to that of x."""
    if not isinstance(saved, RMSNormKernelSaved) or not is_float32(dskip) or dskip.shape != saved.shape:
        dx, dweight = rms_norm_backward(dy, saved)
        return dskip + dx, dweight
    return _gradients(dy, saved, as_rows(dskip))


def _gradients(dy: np.ndarray, saved: RMSNormKernelSaved, dskip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, inverse, weight, shape = saved
    dy = upstream(dy, shape)
    dx, parts = empty(shape), empty(((x.shape[0] + BLOCK - 1) // BLOCK, x.shape[1]))
    _backward(as_rows(dy), dskip, x, inverse, weight, as_rows(dx), parts)
    return dx, sum_rows(parts)


KERNELS = (*linear.KERNELS, _forward, _backward)
