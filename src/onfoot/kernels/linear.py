"""Linear layers: three matrix products, with the bias added as the results are written."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import few_rows, quantized
from onfoot.kernels import product as products
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.few_rows import FEW, few_rows_product, is_few
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.product import NO_ROW, NO_ROWS, product, thread_product
from onfoot.kernels.quantized import quantized_input_gradient, quantized_product
from onfoot.kernels.shapes import as_rows, contiguous, fall_back_to_formula, is_float32, thread_range, threads, upstream
from onfoot.quantized import Transposed


class LinearKernelSaved(NamedTuple):
    x: np.ndarray
    weight: np.ndarray
    has_bias: bool


class FrozenLinearKernelSaved(NamedTuple):
    weight: np.ndarray
    shape: tuple[int, ...]  # of x


@inner
def thread_sum(x: np.ndarray, total: np.ndarray, thread: int, threads: int) -> None:
    """Σ over the rows of x on one thread: some columns, so that every sum has the same order."""
    a, e = thread_range(x.shape[1], 64, thread, threads)
    out = total[a:e]
    out[:] = 0
    together = x.shape[0] // 4 * 4
    for i in range(0, together, 4):  # sums of sums: less rounding, and `out` is read less often
        row0, row1, row2, row3 = x[i, a:e], x[i + 1, a:e], x[i + 2, a:e], x[i + 3, a:e]
        for j in range(e - a):
            out[j] += (row0[j] + row1[j]) + (row2[j] + row3[j])
    for i in range(together, x.shape[0]):
        row = x[i, a:e]
        for j in range(e - a):
            out[j] += row[j]


@kernel("f4[:,::1], f4[::1]", "n c, c")
def _sum_rows(x: np.ndarray, total: np.ndarray, thread: int, threads: int) -> None:
    thread_sum(x, total, thread, threads)


@kernel(
    "f4[:,::1], f4[:,:], f4[:,::1], f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[:,:]",
    "n o, o i, n i, n a, n b, . b, o?, threads .",
)
def _backward(
    dy: np.ndarray,
    weight_t: np.ndarray,
    dx: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    dweight: np.ndarray,
    dbias: np.ndarray,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """dx = dy wᵗ and dw = leftᵗ right, without a barrier in between.

    db = Σ dy is the last row of `dweight` if that has one extra row; otherwise it is written to `dbias`, unless empty.
    """
    if dbias.size:
        thread_sum(dy, dbias, thread, threads)  # eq FC.4
    none, nothing = dbias[:0], dx[:0]
    thread_product(dy, weight_t, dx, none, nothing, False, work, thread, threads)  # eq FC.2
    thread_product(left.T, right, dweight, none, nothing, False, work, thread, threads)  # eq FC.3


def sum_rows(x: np.ndarray) -> np.ndarray:
    """(N, C) -> (C,). The threads divide the columns, so every sum has the same order."""
    total = empty(x.shape[1:])
    _sum_rows(x, total)
    return total


def shapes_match(x: Any, weight: Any, bias: Any, skip: Any = None) -> bool:
    """Whether the kernels support these arrays and their shapes match; otherwise `ops` is used."""
    if not is_float32(x) or not is_weight(weight) or weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[0]:
        return False
    if bias is not None and (not is_float32(bias) or bias.shape != weight.shape[1:]):
        return False
    return skip is None or (is_float32(skip) and skip.shape == x.shape[:-1] + weight.shape[1:])


def is_weight(weight: Any) -> bool:
    """Whether the products below support this weight: float32, or a transposed quantized one."""
    return is_float32(weight) or isinstance(weight, Transposed)


def affine(
    x: np.ndarray,
    weight: Any,
    bias: np.ndarray | None,
    out: np.ndarray | None = None,
    skip: np.ndarray | None = None,
) -> np.ndarray:
    """x w + b + skip, (..., in) -> (..., out)."""
    rows = as_rows(x)
    n, width = rows.shape[0], weight.shape[1]
    out = empty((n, width)) if out is None else out
    bias = NO_ROW if bias is None else contiguous(bias)
    skip = NO_ROWS if skip is None else as_rows(skip)
    if isinstance(weight, Transposed):
        quantized_product(rows, weight.T, bias, skip, out)
    elif is_few(n, weight):
        few_rows_product(rows, weight, bias, skip, out)
    else:
        product(rows, weight, bias, skip, out)  # eq FC.1
    return out.reshape(*x.shape[:-1], width)


def input_gradient(dy: np.ndarray, weight: Any, out: np.ndarray | None = None) -> np.ndarray:
    """dy wᵗ, (..., out) -> (..., in)."""
    if not isinstance(weight, Transposed):
        return affine(dy, weight.T, None, out)  # eq FC.2
    rows = as_rows(dy)
    out = empty((rows.shape[0], weight.shape[0])) if out is None else out
    quantized_input_gradient(rows, weight.T, out)
    return out.reshape(*dy.shape[:-1], weight.shape[0])


def linear_forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
    """y = x w + b~, the bias broadcast over the tokens."""
    if not shapes_match(x, weight, bias):
        return fall_back_to_formula(ops.linear_forward, x, weight, bias)
    return affine(x, weight, bias), LinearKernelSaved(x, weight, bias is not None)


def linear_skip(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, skip: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = skip + x w + b~: a layer with its skip connection. Its backward pass is `linear_backward`."""
    if skip is None or not shapes_match(x, weight, bias, skip):
        y, saved = linear_forward(x, weight, bias)
        return skip + y, saved
    return affine(x, weight, bias, skip=skip), LinearKernelSaved(x, weight, bias is not None)


def linear_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Gradients of x, weight and bias (None where there is no bias)."""
    if not isinstance(saved, LinearKernelSaved):
        return ops.linear_backward(dy, saved)
    x, weight, has_bias = saved
    dy = upstream(dy, x.shape[:-1] + weight.shape[1:])
    left, right = as_rows(x), as_rows(dy)
    transposed = isinstance(weight, np.ndarray) and not weight.flags.c_contiguous  # a tied head: stored (out, in)
    if right.shape[0] <= FEW or isinstance(weight, Transposed):
        dweight = product(right.T, left).T if transposed else product(left.T, right)  # eq FC.3
        return input_gradient(dy, weight), dweight, sum_rows(right) if has_bias else None  # eq FC.4
    dx, work = empty(x.shape), scratch(threads(), products.SCRATCH)
    if transposed:
        dweight, dbias = empty((right.shape[1], left.shape[1])), empty((right.shape[1],)) if has_bias else None
        _backward(right, weight.T, as_rows(dx), right, left, dweight, NO_ROW if dbias is None else dbias, work)
        return dx, dweight.T, dbias
    both = empty((left.shape[1] + has_bias, right.shape[1]))
    _backward(right, weight.T, as_rows(dx), left, right, both, NO_ROW, work)
    return dx, both[: left.shape[1]], both[-1] if has_bias else None


def weight_gradient(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The gradient of weight alone, summed over all rows."""
    if not is_float32(x, dy) or x.shape[:-1] != dy.shape[:-1]:
        return fall_back_to_formula(ops.weight_gradient, x, dy)
    return product(as_rows(x).T, as_rows(dy))  # eq FC.3


def frozen_linear_forward(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, Any]:
    """`linear_forward` with frozen weights: x need not be kept."""
    if not shapes_match(x, weight, bias):
        return fall_back_to_formula(ops.frozen_linear_forward, x, weight, bias)
    return affine(x, weight, bias), FrozenLinearKernelSaved(weight, x.shape)


def frozen_linear_skip(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, skip: np.ndarray
) -> tuple[np.ndarray, Any]:
    """`linear_skip` with frozen weights: y = skip + x w + b~."""
    if skip is None or not shapes_match(x, weight, bias, skip):
        y, saved = frozen_linear_forward(x, weight, bias)
        return skip + y, saved
    return affine(x, weight, bias, skip=skip), FrozenLinearKernelSaved(weight, x.shape)


def frozen_linear_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """The gradient of x only: the weights are frozen."""
    if not isinstance(saved, FrozenLinearKernelSaved):
        return ops.frozen_linear_backward(dy, saved)
    return input_gradient(upstream(dy, saved.shape[:-1] + saved.weight.shape[1:]), saved.weight)


KERNELS = (*products.KERNELS, *few_rows.KERNELS, *quantized.KERNELS, _sum_rows, _backward)
