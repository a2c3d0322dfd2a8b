"""Products of a few rows with a large matrix, as in generation: the speed is limited by memory bandwidth.

Each thread reads one contiguous part of the weight, once. A weight stored (in, out) is divided among the threads by
rows: each sums x[k] w[k, :], four rows at a time, and the parts are added. One stored (out, in), as the token table is,
is divided by outputs: each is a dot product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.kernels.buffers import scratch
from onfoot.kernels.codes import MOST, float32_dots
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import Kernel, inner, kernel
from onfoot.kernels.shapes import thread_range, threads
from onfoot.kernels.simd import add_product, address
from onfoot.quantized import BLOCK

FEW = 8  # rows of x: up to this many, this is faster than the blocked product
FEW_DOTS = 16  # the same for a weight stored (out, in)
GROUP = 4  # rows of the weight that are added in one pass over y
STRIP = 2048  # columns of y at a time: they stay in the L1 cache
KEPT = 1 << 18  # bytes of the weight that stay in the L2 cache while several groups of rows are multiplied
TURNED = 64  # columns of y that are transposed at a time


@inner
def begin(bias: np.ndarray, skip: np.ndarray, i: int, first: int, out: np.ndarray) -> None:
    """Initialises a part of row i with bias and skip, if they are not empty."""
    for j in range(out.size):
        out[j] = bias[j] if bias.size else F(0)
    if skip.size:
        beside = skip[i, first : first + out.size]
        for j in range(out.size):
            out[j] += beside[j]


@inner
def _part_by_rows(x: np.ndarray, weight: np.ndarray, sums: np.ndarray, part: int, parts: int) -> None:
    m, depth = x.shape
    n = weight.shape[1]
    first, last = thread_range(depth, GROUP, part, parts)
    sums[: m * n] = 0
    for k in range(first, last - GROUP + 1, GROUP):
        for j0 in range(0, n, STRIP):
            j1 = min(n, j0 + STRIP)
            w0, w1, w2, w3 = weight[k, j0:j1], weight[k + 1, j0:j1], weight[k + 2, j0:j1], weight[k + 3, j0:j1]
            for i in range(m):
                out = sums[i * n + j0 : i * n + j1]
                x0, x1, x2, x3 = x[i, k], x[i, k + 1], x[i, k + 2], x[i, k + 3]
                for j in range(j1 - j0):
                    out[j] += x0 * w0[j] + x1 * w1[j] + x2 * w2[j] + x3 * w3[j]
    for k in range(first + (last - first) // GROUP * GROUP, last):
        row = weight[k]
        for i in range(m):
            out = sums[i * n : (i + 1) * n]
            x0 = x[i, k]
            for j in range(n):
                out[j] += x0 * row[j]


@kernel("f4[:,::1], f4[:,::1], f4[:,::1]", "m k, k n, . .")
def _by_rows(x: np.ndarray, weight: np.ndarray, work: np.ndarray, thread: int, threads: int) -> None:
    """One row of `work` per part of the weight; with fewer threads than parts, a thread computes several."""
    for part in range(thread, work.shape[0], threads):
        _part_by_rows(x, weight, work[part], part, work.shape[0])


@kernel("f4[:,::1], f4[::1], f4[:,::1], f4[:,::1]", ". ., n?, m n?, m n")
def _add_parts(work: np.ndarray, bias: np.ndarray, skip: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
    m, n = y.shape
    a, e = thread_range(n, 64, thread, threads)
    for i in range(m):
        out = y[i, a:e]
        begin(bias[a:e], skip, i, a, out)
        for s in range(work.shape[0]):
            part = work[s, i * n + a : i * n + e]
            for j in range(e - a):
                out[j] += part[j]


@inner
def put_columns(columns: np.ndarray, bias: np.ndarray, skip: np.ndarray, y: np.ndarray, first: int, last: int) -> None:
    """y = columns + bias + skip in the columns first ... last; bias and skip may be empty."""
    m = y.shape[0]
    for j0 in range(first, last, TURNED):
        j1 = min(last, j0 + TURNED)
        for i in range(m):
            out = y[i, j0:j1]
            begin(bias[j0:j1], skip, i, j0, out)
            for j in range(j1 - j0):
                out[j] += columns[(j0 - first + j) * m + i]


def dots_kernel(name: str, kind: str, dots: Any, widen: Any) -> Kernel:
    """The kernel y = x wᵗ + b + skip for weights of a kind (f4 or u2): `dots` multiplies blocks, `widen` converts."""

    @kernel(
        f"f4[:,::1], {kind}[:,::1], f4[::1], f4[:,::1], f4[:,::1], f4[:,::1]",
        "m k, n k, n?, m n?, threads ., m n",
        f"{name}_dots",
    )
    def by_dots(
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray,
        skip: np.ndarray,
        work: np.ndarray,
        y: np.ndarray,
        thread: int,
        threads: int,
    ) -> None:
        """Computes columns of y, collected in `work`, a few rows of x at a time: these stay in the L1 cache."""
        m, depth = x.shape
        first, last = thread_range(weight.shape[0], 1, thread, threads)
        columns = work[thread]
        blocks = depth // BLOCK
        step = max(KEPT // weight.strides[0], 1)
        for j0 in range(first, last, step):
            for i0 in range(0, m, MOST):
                i1 = min(m, i0 + MOST)
                for j in range(j0, min(last, j0 + step)):
                    row, done = address(weight) + j * weight.strides[0], (j - first) * m
                    left, to = address(x) + i0 * depth * 4, address(columns) + (done + i0) * 4
                    dots(i1 - i0, left, depth * 4, row, 0, 0, blocks, to)
                    for k in range(blocks * BLOCK, depth):
                        number = widen(weight[j, k])
                        for i in range(i0, i1):
                            columns[done + i] = add_product(x[i, k], number, columns[done + i])
        put_columns(columns, bias, skip, y, first, last)

    return by_dots


@inner
def _as_it_is(number: float) -> float:
    return number


_by_dots = dots_kernel("float32", "f4", float32_dots, _as_it_is)


def is_few(rows: int, weight: np.ndarray) -> bool:
    """Whether `few_rows_product` supports this weight and is faster for so many rows than the blocked product."""
    return (weight.flags.c_contiguous and rows <= FEW) or (weight.flags.f_contiguous and rows <= FEW_DOTS)


def few_rows_product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, skip: np.ndarray, y: np.ndarray) -> None:
    """y = x w + b + skip for a few contiguous rows; the weight or its transpose must be contiguous.

    `bias` and `skip` may be empty.
    """
    if weight.flags.c_contiguous:
        work = scratch(threads(), y.size)
        _by_rows(x, weight, work)
        _add_parts(work, bias, skip, y)
    else:
        _by_dots(x, weight.T, bias, skip, scratch(threads(), y.size), y)


KERNELS = (_by_rows, _add_parts, _by_dots)
