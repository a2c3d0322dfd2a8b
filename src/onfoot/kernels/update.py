"""Sums, and AdamW's update in one pass: seven streams of memory instead of a dozen."""

from __future__ import annotations

import math

import numpy as np

from onfoot.kernels.buffers import empty
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.library import DATA
from onfoot.kernels.linear import sum_rows
from onfoot.kernels.shapes import contiguous, fall_back_to_formula, is_float32, thread_range
from onfoot.kernels.simd import floats, integers
from onfoot.ops import update as ops

GRAIN = 1024  # elements
BLOCK = 1 << 16  # elements whose squares are summed first, for any number of threads


@inner
def data(array: int) -> int:
    """The address of an array's data, from the address of the array object."""
    return integers(array + DATA, 1)[0]


@kernel("i8[:,::1], f4[::1], f4, f4, f4, f4, f4, f4, f4, f4", "k ., k")
def _update(
    places: np.ndarray,
    keep: np.ndarray,
    beta1: float,
    beta2: float,
    rest1: float,
    rest2: float,
    spread: float,
    eps: float,
    step: float,
    scale: float,
    thread: int,
    threads: int,
) -> None:
    """`places` has one row per parameter: the addresses of the array objects p, m, v and g, and their size.

    rest1 and rest2 are 1 − β₁ and 1 − β₂, computed in float64: in float32, 1 − 0.999 loses most of its digits.
    """
    for k in range(places.shape[0]):
        a, e = thread_range(places[k, 4], GRAIN, thread, threads)
        n, at, kept = e - a, a * 4, keep[k]
        pp, mm = floats(data(places[k, 0]) + at, n), floats(data(places[k, 1]) + at, n)
        vv, gg = floats(data(places[k, 2]) + at, n), floats(data(places[k, 3]) + at, n)
        for i in range(n):
            grad = gg[i] * scale
            first = beta1 * mm[i] + rest1 * grad  # eq ADAM.2
            second = beta2 * vv[i] + rest2 * (grad * grad)  # eq ADAM.3
            mm[i], vv[i] = first, second
            pp[i] = kept * pp[i] - step * first / (np.sqrt(second) * spread + eps)  # eq ADAM.1, ADAM.4, ADAM.5


@kernel("f4[::1], f4[::1], f4[::1]", "n, ., n")
def _add(x: np.ndarray, y: np.ndarray, total: np.ndarray, thread: int, threads: int) -> None:
    """y may be shorter than x: it is then repeated."""
    a, e = thread_range(x.size, GRAIN, thread, threads)
    while a < e:
        first = a % y.size
        n = min(e - a, y.size - first)
        xx, yy, out = x[a : a + n], y[first : first + n], total[a : a + n]
        for i in range(n):
            out[i] = xx[i] + yy[i]
        a += n


@kernel("f4[::1], f4[::1], f4[::1]", "n, n, n")
def _times(x: np.ndarray, y: np.ndarray, out: np.ndarray, thread: int, threads: int) -> None:
    a, e = thread_range(x.size, GRAIN, thread, threads)
    xx, yy, to = x[a:e], y[a:e], out[a:e]
    for i in range(e - a):
        to[i] = xx[i] * yy[i]


@kernel("f4[::1], f4", "n")
def _scale(x: np.ndarray, factor: float, thread: int, threads: int) -> None:
    a, e = thread_range(x.size, GRAIN, thread, threads)
    part = x[a:e]
    for i in range(e - a):
        part[i] *= factor


@kernel("f4[::1], f4[:,::1]", "n, . n")
def _sum_into_first(first: np.ndarray, others: np.ndarray, thread: int, threads: int) -> None:
    a, e = thread_range(first.size, GRAIN, thread, threads)
    total = first[a:e]
    for k in range(others.shape[0]):
        part = others[k, a:e]
        for i in range(e - a):
            total[i] += part[i]


@kernel("f4[::1], f8[::1]")
def _squares(x: np.ndarray, sums: np.ndarray, thread: int, threads: int) -> None:
    first, last = thread_range(sums.size, 1, thread, threads)
    for b in range(first, last):
        part = x[b * BLOCK : (b + 1) * BLOCK]
        total = 0.0
        for i in range(part.size):
            total += np.float64(part[i]) * np.float64(part[i])
        sums[b] = total


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x + y, where y may lack the leading axes of x."""
    if not is_float32(x, y) or x.shape[x.ndim - y.ndim :] != y.shape:
        return fall_back_to_formula(ops.add, x, y)
    total = empty(x.shape)
    _add(contiguous(x).reshape(-1), contiguous(y).reshape(-1), total.reshape(-1))
    return total


def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x ∘ y, of the same shape."""
    out = empty(x.shape)
    _times(contiguous(x).reshape(-1), contiguous(y).reshape(-1), out.reshape(-1))
    return out


def scale_by(x: np.ndarray, factor: float) -> None:
    """x times a number, in place."""
    _scale(x.reshape(-1), factor)


def sum_into_first(first: np.ndarray, others: np.ndarray) -> None:
    """Adds all rows of `others` to `first`."""
    _sum_into_first(first, others)


def sum_first(x: np.ndarray) -> np.ndarray:
    """Σ over the first axis."""
    if not is_float32(x) or x.ndim < 2:
        return ops.sum_first(x)
    return sum_rows(contiguous(x).reshape(x.shape[0], -1)).reshape(x.shape[1:])


def adamw_updates(
    updates: list[ops.Update], lr: float, betas: tuple[float, float], eps: float, steps: int, scale: float = 1.0
) -> None:
    """One update of several parameters in place, in one pass; `scale` multiplies the gradients."""
    places: list[int] = []
    keep, alive, others = [], [], []
    for one in updates:
        p, m, v, g, decay = one
        ready = is_float32(p, m, v, g) and p.flags.carray and m.flags.carray and v.flags.carray
        if not ready or not p.shape == m.shape == v.shape == g.shape:
            others.append(one)
            continue
        g = contiguous(g)
        alive.append(g)
        places += (id(p), id(m), id(v), id(g), p.size)
        keep.append(1 - lr * decay)
    written = {place for i in range(3) for place in places[i::5]}
    if len(written) < 3 * len(keep):  # the same array twice: one update after the other, as in the formula
        places, others = [], updates
    ops.adamw_updates(others, lr, betas, eps, steps, scale)
    if not places:
        return
    beta1, beta2 = betas
    _update(
        np.array(places).reshape(-1, 5),
        np.array(keep, np.float32),
        beta1,
        beta2,
        1 - beta1,
        1 - beta2,
        1 / math.sqrt(ops.correction(beta2, steps)),
        eps,
        lr / ops.correction(beta1, steps),
        scale,
    )


def sum_of_squares(x: np.ndarray) -> float:
    """Σ x², in float64."""
    if not is_float32(x) or not x.flags.c_contiguous:
        return ops.sum_of_squares(x)
    sums = np.empty((x.size + BLOCK - 1) // BLOCK)
    _squares(x.reshape(-1), sums)
    return float(sums.sum())


KERNELS = (_add, _update, _times, _scale, _sum_into_first, _squares)
