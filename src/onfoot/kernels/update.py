"""Sums, and AdamW's update in one pass: seven streams of memory instead of a dozen."""

from __future__ import annotations

import math

import numpy as np

from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import kernel
from onfoot.kernels.shapes import contiguous, fits, share
from onfoot.ops import update as ops

GRAIN = 1024  # elements
BLOCK = 1 << 16  # elements whose squares are summed together, whatever the number of threads


@kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, f4, f4, f4, f4")
def _update(
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    keep: float,
    beta1: float,
    beta2: float,
    spread: float,
    eps: float,
    step: float,
    scale: float,
    thread: int,
    threads: int,
) -> None:
    rest1, rest2 = F(1) - beta1, F(1) - beta2
    a, e = share(p.size, GRAIN, thread, threads)
    pp, mm, vv, gg = p[a:e], m[a:e], v[a:e], g[a:e]  # sliced, then from 0: LLVM vectorises this form best
    for i in range(e - a):
        grad = gg[i] * scale
        first = beta1 * mm[i] + rest1 * grad  # eq ADAM.2
        second = beta2 * vv[i] + rest2 * (grad * grad)  # eq ADAM.3
        mm[i], vv[i] = first, second
        pp[i] = keep * pp[i] - step * first / (np.sqrt(second) * spread + eps)  # eq ADAM.1, ADAM.4, ADAM.5


@kernel("f4[::1], f4[::1], f4[::1]")
def _add(x: np.ndarray, y: np.ndarray, total: np.ndarray, thread: int, threads: int) -> None:
    a, e = share(x.size, GRAIN, thread, threads)
    xx, yy, out = x[a:e], y[a:e], total[a:e]
    for i in range(e - a):
        out[i] = xx[i] + yy[i]


@kernel("f4[::1], f8[::1]")
def _squares(x: np.ndarray, sums: np.ndarray, thread: int, threads: int) -> None:
    first, last = share(sums.size, 1, thread, threads)
    for b in range(first, last):
        part = x[b * BLOCK : (b + 1) * BLOCK]
        total = 0.0
        for i in range(part.size):
            total += np.float64(part[i]) * np.float64(part[i])
        sums[b] = total


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y."""
    if not fits(x, y) or x.shape != y.shape:
        return ops.add(x, y)
    total = empty(x.shape)
    _add(contiguous(x).reshape(-1), contiguous(y).reshape(-1), total.reshape(-1))
    return total


def adamw_update(
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    steps: int,
    scale: float = 1.0,
) -> None:
    """One update of p, m and v in place. `decay` is 0 for biases and norms; `scale` multiplies the gradient."""
    if not fits(p, m, v, g) or not all(x.flags.c_contiguous for x in (p, m, v)):
        ops.adamw_update(p, m, v, g, lr, betas, eps, decay, steps, scale)
        return
    beta1, beta2 = betas
    _update(
        p.reshape(-1),
        m.reshape(-1),
        v.reshape(-1),
        contiguous(g).reshape(-1),
        1 - lr * decay,
        beta1,
        beta2,
        1 / math.sqrt(1 - beta2**steps),
        eps,
        lr / (1 - beta1**steps),
        scale,
    )


def sum_of_squares(x: np.ndarray) -> float:
    """Σ x², in float64."""
    if not fits(x) or not x.flags.c_contiguous:
        return ops.sum_of_squares(x)
    sums = np.empty((x.size + BLOCK - 1) // BLOCK)
    _squares(x.reshape(-1), sums)
    return float(sums.sum())


KERNELS = (_add, _update, _squares)
