"""Layer norm: a row is read once from memory, and stays in the cache for its three passes.

x is kept, with each row's mean and 1/σ; the backward pass recomputes ā.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.shapes import as_rows, contiguous, fall_back_to_formula, is_float32, thread_range, upstream

TINY, HUGE = F(1e-30), F(1e37)  # outside this range, a sum of squares is not accurate in float32
BLOCK = 16  # rows whose contributions to dweight and dbias are summed first, for any number of threads


class LayerNormKernelSaved(NamedTuple):
    x: np.ndarray  # (N, C)
    mean: np.ndarray  # (N,)
    rstd: np.ndarray  # 1/σ, (N,)
    weight: np.ndarray
    shape: tuple[int, ...]  # of x


@inner
def exact_mean_and_rstd(row: np.ndarray, eps: float) -> tuple[float, float]:
    """The mean and 1/σ of a row of very large or very small numbers, in float64."""
    total, squares = 0.0, 0.0
    for j in range(row.size):
        total += np.float64(row[j])
    mu = total / row.size
    for j in range(row.size):
        squares += (np.float64(row[j]) - mu) * (np.float64(row[j]) - mu)
    return F(mu), F(1 / np.sqrt(squares / row.size + eps))


@inner
def norm(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
    y: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
) -> None:
    """y, and each row's mean and 1/σ."""
    n, c = x.shape
    for i in range(n):
        row, out = x[i], y[i]
        total = F(0)
        for j in range(c):
            total += row[j]
        mu = total / F(c)
        squares = F(0)
        for j in range(c):
            squares += (row[j] - mu) * (row[j] - mu)
        r = F(1) / np.sqrt(squares / F(c) + F(eps))
        if not TINY < squares < HUGE:  # squares overflow or underflow in float32
            mu, r = exact_mean_and_rstd(row, eps)
        mean[i], rstd[i] = mu, r
        for j in range(c):
            out[j] = (row[j] - mu) * r * weight[j] + bias[j]  # eq 36, 37, 38


@inner
def norm_backward(
    dy: np.ndarray,
    dskip: np.ndarray,
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    weight: np.ndarray,
    dx: np.ndarray,
    parts: np.ndarray,
) -> None:
    """dx, and the contributions of every BLOCK rows to dweight and dbias."""
    n, c = x.shape
    for b in range((n + BLOCK - 1) // BLOCK):
        dw, db = parts[b, 0], parts[b, 1]
        dw[:] = 0
        db[:] = 0
        for i in range(b * BLOCK, min((b + 1) * BLOCK, n)):
            row, up, out = x[i], dy[i], dx[i]
            mu, r = mean[i], rstd[i]
            total, along = F(0), F(0)
            for j in range(c):
                normed = (row[j] - mu) * r
                dnormed = up[j] * weight[j]
                total += dnormed
                along += normed * dnormed
                dw[j] += normed * up[j]
                db[j] += up[j]
            total /= F(c)
            along /= F(c)
            for j in range(c):
                out[j] = (up[j] * weight[j] - total - (row[j] - mu) * r * along) * r  # eq 40
            if dskip.shape[0]:
                skip_gradient = dskip[i]
                for j in range(c):
                    out[j] += skip_gradient[j]


@kernel("f4[:,::1], f4[::1], f4[::1], f8, f4[:,::1], f4[::1], f4[::1]", "n c, c, c, , n c, n, n")
def _forward(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    eps: float,
    y: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(x.shape[0], BLOCK, thread, threads)
    norm(x[a:e], weight, bias, eps, y[a:e], mean[a:e], rstd[a:e])


@kernel(
    "f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1], f4[::1], f4[:,::1], f4[:,:,::1]",
    "n c, n c?, n c, n, n, c, n c, . . c",
)
def _backward(
    dy: np.ndarray,
    dskip: np.ndarray,
    x: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    weight: np.ndarray,
    dx: np.ndarray,
    parts: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(x.shape[0], BLOCK, thread, threads)
    own = parts[a // BLOCK :]
    norm_backward(dy[a:e], dskip[a:e], x[a:e], mean[a:e], rstd[a:e], weight, dx[a:e], own)


@inner
def thread_sum_of_parts(parts: np.ndarray, dweight: np.ndarray, dbias: np.ndarray, thread: int, threads: int) -> None:
    """Sums the contributions; each thread computes some columns."""
    blocks, _, c = parts.shape
    a, e = thread_range(c, 64, thread, threads)
    dw, db = dweight[a:e], dbias[a:e]
    dw[:] = 0
    db[:] = 0
    for b in range(blocks):
        part_w, part_b = parts[b, 0, a:e], parts[b, 1, a:e]
        for j in range(e - a):
            dw[j] += part_w[j]  # eq 41
            db[j] += part_b[j]  # eq 42


@kernel("f4[:,:,::1], f4[::1], f4[::1]", ". . c, c, c")
def sum_parts(parts: np.ndarray, dweight: np.ndarray, dbias: np.ndarray, thread: int, threads: int) -> None:
    thread_sum_of_parts(parts, dweight, dbias, thread, threads)


def layer_norm_forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = 1e-5
) -> tuple[np.ndarray, Any]:
    """y = ā ∘ w + b with ā = (x − μ)/σ, over the features of each token."""
    if not is_float32(x, weight, bias) or not x.ndim or not x.shape[-1:] == weight.shape == bias.shape:
        return fall_back_to_formula(ops.layer_norm_forward, x, weight, bias, eps)
    rows, weight = as_rows(x), contiguous(weight)
    y, (mean, rstd) = empty(rows.shape), empty((2, rows.shape[0]))
    _forward(rows, weight, contiguous(bias), eps, y, mean, rstd)
    return y.reshape(x.shape), LayerNormKernelSaved(rows, mean, rstd, weight, x.shape)


def layer_norm_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, weight and bias."""
    if not isinstance(saved, LayerNormKernelSaved):
        return ops.layer_norm_backward(dy, saved)
    return _gradients(dy, saved, _NO_SKIP)


def layer_norm_skip_backward(
    dy: np.ndarray, saved: Any, dskip: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, weight and bias; `dskip`, the gradient of the skip connection, is added to that of x."""
    if not isinstance(saved, LayerNormKernelSaved) or not is_float32(dskip) or dskip.shape != saved.shape:
        dx, dweight, dbias = layer_norm_backward(dy, saved)
        return dskip + dx, dweight, dbias
    return _gradients(dy, saved, as_rows(dskip))


def _gradients(
    dy: np.ndarray, saved: LayerNormKernelSaved, dskip: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, mean, rstd, weight, shape = saved
    dy = upstream(dy, shape)
    dx, dweight, dbias = empty(shape), empty(weight.shape), empty(weight.shape)
    parts = empty(((x.shape[0] + BLOCK - 1) // BLOCK, 2, x.shape[1]))
    _backward(as_rows(dy), dskip, x, mean, rstd, weight, as_rows(dx), parts)
    sum_parts(parts, dweight, dbias)
    return dx, dweight, dbias


_NO_SKIP = np.empty((0, 0), np.float32)
KERNELS = (_forward, _backward, sum_parts)
