"""Products of a few rows with a large matrix, as in generation: the speed is limited by memory bandwidth.

Each thread reads one contiguous part of the weight, once, as four interleaved streams: one alone is slower. A weight
stored (in, out) is divided among the threads by rows: each sums x[k] w[k, :], and the parts are added. One stored
(out, in), as the token table is, is divided by outputs: each is a dot product.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels.buffers import scratch
from onfoot.kernels.elementary import F
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.shapes import thread_range, threads

FEW = 8  # rows of x: up to this many, this is faster than the blocked product
GROUP = 4  # rows of the weight that are added in one pass over y
STRIP = 2048  # columns of y at a time: they stay in the L1 cache


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


@kernel("f4[:,::1], f4[:,::1], f4[::1], f4[:,::1], f4[:,::1]", "m k, n k, n?, m n?, m n")
def _by_dots(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray,
    y: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    m, depth = x.shape
    first, last = thread_range(weight.shape[0], 1, thread, threads)
    for i in range(m):
        begin(bias[first:last], skip, i, first, y[i, first:last])
    each = (last - first) // 4
    for j in range(first, first + each):
        w0, w1, w2, w3 = weight[j], weight[j + each], weight[j + 2 * each], weight[j + 3 * each]
        for i in range(m):
            left = x[i]
            total0, total1, total2, total3 = F(0), F(0), F(0), F(0)
            for k in range(depth):
                total0 += left[k] * w0[k]
                total1 += left[k] * w1[k]
                total2 += left[k] * w2[k]
                total3 += left[k] * w3[k]
            y[i, j] += total0
            y[i, j + each] += total1
            y[i, j + 2 * each] += total2
            y[i, j + 3 * each] += total3
    for j in range(first + 4 * each, last):
        row = weight[j]
        for i in range(m):
            left = x[i]
            total = F(0)
            for k in range(depth):
                total += left[k] * row[k]
            y[i, j] += total


def few_rows_product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, skip: np.ndarray, y: np.ndarray) -> None:
    """y = x w + b + skip for a few contiguous rows; the weight or its transpose must be contiguous.

    `bias` and `skip` may be empty.
    """
    if weight.flags.c_contiguous:
        work = scratch(threads(), y.size)
        _by_rows(x, weight, work)
        _add_parts(work, bias, skip, y)
    else:
        _by_dots(x, weight.T, bias, skip, y)


KERNELS = (_by_rows, _add_parts, _by_dots)
