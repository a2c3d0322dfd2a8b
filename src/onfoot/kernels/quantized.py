"""Products with quantized weights: a quarter or an eighth of the memory, and of the time to read it.

A few rows are multiplied directly with the codes. For many (a prompt, or training on a frozen base) one part of the
weight at a time is dequantized to float32, which costs little compared with the product.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels import product as products
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.codes import dots4, dots8, scale8
from onfoot.kernels.cpu import HALF_FLOATS
from onfoot.kernels.elementary import F
from onfoot.kernels.few_rows import FEW, begin
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.product import product
from onfoot.kernels.shapes import contiguous, thread_range, threads
from onfoot.kernels.simd import address
from onfoot.quantized import BLOCK, QuantizedWeight

SCALES = "u2[:,::1]" if HALF_FLOATS else "f4[:,::1]"
PART = 1 << 21  # weights dequantized at a time: 8 MB
HALF = BLOCK // 2
STRIP = 64  # columns of y that are transposed at a time: they stay in the L1 cache
SEVERAL = 24  # rows: up to this many, 8-bit codes are multiplied directly


@inner
def put_columns(columns: np.ndarray, bias: np.ndarray, skip: np.ndarray, y: np.ndarray, first: int, last: int) -> None:
    """y = columns + bias + skip in the columns first ... last; bias and skip may be empty."""
    m = y.shape[0]
    for j0 in range(first, last, STRIP):
        j1 = min(last, j0 + STRIP)
        for i in range(m):
            out = y[i, j0:j1]
            begin(bias[j0:j1], skip, i, j0, out)
            for j in range(j1 - j0):
                out[j] += columns[(j0 - first + j) * m + i]


@kernel(
    f"f4[:,::1], i1[:,:,::1], {SCALES}, f4[::1], f4[:,::1], f4[:,::1], f4[:,::1]",
    "m ., o b ., o b, o?, m o?, threads ., m o",
)
def _dots8(
    x: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray,
    work: np.ndarray,
    y: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Computes one column of y at a time, which is first collected in `work`."""
    m, depth = x.shape
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    columns = address(work) + thread * work.strides[0]
    for j in range(first, last):
        row, factors = address(codes) + j * depth, address(scale) + j * scale.strides[0]
        dots8(m, address(x), depth * 4, row, factors, codes.shape[1], columns + (j - first) * m * 4)
    put_columns(work[thread], bias, skip, y, first, last)


@kernel(
    "f4[:,::1], u1[:,:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[:,::1], f4[:,::1], f4[:,::1]",
    "m ., o b ., o b, o b, o?, m o?, threads ., m o",
)
def _dots4(
    x: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray,
    work: np.ndarray,
    y: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """`_dots8` for two codes per byte."""
    m, depth = x.shape
    blocks = codes.shape[1]
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    columns = address(work) + thread * work.strides[0]
    for j in range(first, last):
        row, at = address(codes) + j * (depth // 2), j * blocks * 4
        to = columns + (j - first) * m * 4
        dots4(m, address(x), depth * 4, row, address(scale) + at, address(minimum) + at, blocks, to)
    put_columns(work[thread], bias, skip, y, first, last)


@kernel(f"i1[:,:,::1], {SCALES}, f4[:,::1]", "o b ., o b, o .")
def _write8(codes: np.ndarray, scale: np.ndarray, out: np.ndarray, thread: int, threads: int) -> None:
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    for j in range(first, last):
        for b in range(codes.shape[1]):
            row, to = codes[j, b], out[j, b * BLOCK : (b + 1) * BLOCK]
            factor = scale8(address(scale), j * codes.shape[1] + b)
            for k in range(BLOCK):
                to[k] = F(row[k]) * factor  # eq QUANT.1


@kernel("u1[:,:,::1], f4[:,::1], f4[:,::1], f4[:,::1]", "o b ., o b, o b, o .")
def _write4(
    codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray, out: np.ndarray, thread: int, threads: int
) -> None:
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    for j in range(first, last):
        for b in range(codes.shape[1]):
            row, factor, shift = codes[j, b], scale[j, b], minimum[j, b]
            low, high = out[j, b * BLOCK : b * BLOCK + HALF], out[j, b * BLOCK + HALF : (b + 1) * BLOCK]
            for k in range(HALF):
                low[k] = F(row[k] & 15) * factor + shift  # eq QUANT.2, QUANT.3
                high[k] = F(row[k] >> 4) * factor + shift


@kernel(f"i8[::1], i1[:,:,::1], {SCALES}, f4[:,::1]", "n, v b ., v b, n .")
def _gather8(ids: np.ndarray, codes: np.ndarray, scale: np.ndarray, out: np.ndarray, thread: int, threads: int) -> None:
    first, last = thread_range(ids.size, 1, thread, threads)
    for i in range(first, last):
        for b in range(codes.shape[1]):
            row, to = codes[ids[i], b], out[i, b * BLOCK : (b + 1) * BLOCK]
            factor = scale8(address(scale), ids[i] * codes.shape[1] + b)
            for k in range(BLOCK):
                to[k] = F(row[k]) * factor  # eq QUANT.1


@kernel("i8[::1], u1[:,:,::1], f4[:,::1], f4[:,::1], f4[:,::1]", "n, v b ., v b, v b, n .")
def _gather4(
    ids: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray,
    out: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    first, last = thread_range(ids.size, 1, thread, threads)
    for i in range(first, last):
        for b in range(codes.shape[1]):
            row, factor, shift = codes[ids[i], b], scale[ids[i], b], minimum[ids[i], b]
            low, high = out[i, b * BLOCK : b * BLOCK + HALF], out[i, b * BLOCK + HALF : (b + 1) * BLOCK]
            for k in range(HALF):
                low[k] = F(row[k] & 15) * factor + shift  # eq QUANT.2, QUANT.3
                high[k] = F(row[k] >> 4) * factor + shift


def gathered(ids: np.ndarray, weight: QuantizedWeight, out: np.ndarray) -> None:
    """Writes the rows of `ids` (N,) to `out`, as float32."""
    codes = contiguous(weight.codes)
    if weight.kind == "Q8_0":
        _gather8(ids, codes, _scales(weight), out)
    else:
        _gather4(ids, codes, *weight.factors, out)


def _scales(weight: QuantizedWeight) -> np.ndarray:
    """The scales in the form that the 8-bit kernels need."""
    return contiguous(weight.scale).view(np.uint16) if HALF_FLOATS else weight.factors[0]


def _written(weight: QuantizedWeight, rows: slice) -> np.ndarray:
    """Some rows of the weight (out, in), dequantized to float32."""
    out = empty((rows.stop - rows.start, weight.shape[1]))
    codes = contiguous(weight.codes[rows])
    if weight.kind == "Q8_0":
        _write8(codes, _scales(weight)[rows], out)
    else:
        scale, minimum = weight.factors
        _write4(codes, scale[rows], minimum[rows], out)
    return out


def _parts(weight: QuantizedWeight) -> list[slice]:
    step = max(PART // weight.shape[1], 1)
    return [slice(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step)]


def quantized_product(
    x: np.ndarray, weight: QuantizedWeight, bias: np.ndarray, skip: np.ndarray, y: np.ndarray
) -> None:
    """y = x wᵗ + b + skip: (N, in) -> (N, out). `bias` and `skip` may be empty."""
    if x.shape[0] > (SEVERAL if weight.kind == "Q8_0" else FEW):
        _many_rows(x, weight, bias, skip, y)
        return
    codes = contiguous(weight.codes)
    if weight.kind == "Q8_0":
        _dots8(x, codes, _scales(weight), bias, skip, scratch(threads(), y.size), y)
        return
    _dots4(x, codes, *weight.factors, bias, skip, scratch(threads(), y.size), y)


def _many_rows(x: np.ndarray, weight: QuantizedWeight, bias: np.ndarray, skip: np.ndarray, y: np.ndarray) -> None:
    for part in _parts(weight):
        beside = skip[:, part] if skip.size else skip
        product(x, _written(weight, part).T, bias[part], beside, out=y[:, part])


def quantized_input_gradient(dy: np.ndarray, weight: QuantizedWeight, dx: np.ndarray) -> None:
    """dx = dy w: (N, out) -> (N, in)."""
    for part in _parts(weight):
        product(dy[:, part], _written(weight, part), out=dx, accumulate=part.start > 0)


KERNELS = (*products.KERNELS, _dots8, _dots4, _write8, _write4, _gather8, _gather4)
