"""Products with frozen weights in few bits: a half to an eighth of the memory, and of the time to read it.

A few rows are multiplied directly with the codes. For many (a prompt, or training on a frozen base) one part of the
weight at a time is dequantized to float32, which costs little compared with the product. The products with 16-bit
floats are in `half`.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels import half
from onfoot.kernels import product as products
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.codes import dot8_16, dot8_32, dots4, dots8, scale8
from onfoot.kernels.cpu import HALF_FLOATS
from onfoot.kernels.elementary import F
from onfoot.kernels.few_rows import FEW, FEW_DOTS, begin, put_columns
from onfoot.kernels.jit import kernel
from onfoot.kernels.product import NO_ROW, NO_ROWS, product
from onfoot.kernels.shapes import contiguous, thread_range, threads
from onfoot.kernels.simd import address
from onfoot.quantized import BLOCK, FrozenWeight, HalfWeight, QuantizedWeight

SCALES = "u2[:,::1]" if HALF_FLOATS else "f4[:,::1]"
PART = 1 << 21  # weights dequantized at a time: 8 MB
HALF = BLOCK // 2
SEVERAL = 24  # rows: up to this many, 8-bit codes are multiplied directly


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
        dots8(m, address(x), depth * 4, row, factors, 0, codes.shape[1], columns + (j - first) * m * 4)
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


@kernel(
    "f4[:,::1], i1[:,:,::1], f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[:,::1], f4[:,::1]",
    "m ., o b ., o b, o b?, m b?, o?, m o?, m o",
)
def _dots_of_bytes(
    x: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray,
    sums: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray,
    y: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """`_dots4` for signed bytes in blocks of 16 or 32; without a minimum, `minimum` and `sums` are empty."""
    m, depth = x.shape
    blocks = codes.shape[1]
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    for i in range(m):
        begin(bias[first:last], skip, i, first, y[i, first:last])
    for j in range(first, last):
        row, factors = address(codes) + j * depth, address(scale) + j * blocks * 4
        for i in range(m):
            left = address(x) + i * depth * 4
            if codes.shape[2] == BLOCK:
                total = dot8_32(left, row, factors, blocks)
            else:
                total = dot8_16(left, row, factors, blocks)
            if minimum.size:
                for b in range(blocks):
                    total += sums[i, b] * minimum[j, b]
            y[i, j] += total


@kernel("f4[:,::1], f4[:,::1]", "m ., m .")
def _block_sums(x: np.ndarray, sums: np.ndarray, thread: int, threads: int) -> None:
    first, last = thread_range(sums.shape[1], 1, thread, threads)
    size = x.shape[1] // sums.shape[1]
    for i in range(x.shape[0]):
        for b in range(first, last):
            row, total = x[i, b * size : (b + 1) * size], F(0)
            for k in range(size):
                total += row[k]
            sums[i, b] = total


@kernel(f"i1[:,:,::1], {SCALES}, f4[:,::1]", "o b ., o b, o .")
def _write8(codes: np.ndarray, scale: np.ndarray, out: np.ndarray, thread: int, threads: int) -> None:
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    for j in range(first, last):
        for b in range(codes.shape[1]):
            row, to = codes[j, b], out[j, b * BLOCK : (b + 1) * BLOCK]
            factor = scale8(address(scale), j * codes.shape[1] + b)
            for k in range(BLOCK):
                to[k] = F(row[k]) * factor  # eq QUANT.1


@kernel("i1[:,:,::1], f4[:,::1], f4[:,::1], f4[:,::1]", "o b ., o b, o b?, o .")
def _write_bytes(
    codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray, out: np.ndarray, thread: int, threads: int
) -> None:
    first, last = thread_range(codes.shape[0], 1, thread, threads)
    size = codes.shape[2]
    for j in range(first, last):
        for b in range(codes.shape[1]):
            row, to, factor = codes[j, b], out[j, b * size : (b + 1) * size], scale[j, b]
            shift = minimum[j, b] if minimum.size else F(0)
            for k in range(size):
                to[k] = F(row[k]) * factor + shift  # eq QUANT.1, QUANT.3


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


@kernel("i8[::1], i1[:,:,::1], f4[:,::1], f4[:,::1], f4[:,::1]", "n, v b ., v b, v b?, n .")
def _gather_bytes(
    ids: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray,
    out: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    first, last = thread_range(ids.size, 1, thread, threads)
    size = codes.shape[2]
    for i in range(first, last):
        for b in range(codes.shape[1]):
            row, to, factor = codes[ids[i], b], out[i, b * size : (b + 1) * size], scale[ids[i], b]
            shift = minimum[ids[i], b] if minimum.size else F(0)
            for k in range(size):
                to[k] = F(row[k]) * factor + shift  # eq QUANT.1, QUANT.3


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


def gathered(ids: np.ndarray, weight: FrozenWeight, out: np.ndarray) -> None:
    """Writes the rows of `ids` (N,) to `out`, as float32."""
    if isinstance(weight, HalfWeight):
        half.HALF[weight.kind].gather(ids, contiguous(weight.bits), out)
        return
    assert isinstance(weight, QuantizedWeight)
    codes = contiguous(weight.codes)
    if _has_half_scales(weight):
        _gather8(ids, codes, _scales(weight), out)
    else:
        (_gather4 if weight.form.bits == 4 else _gather_bytes)(ids, codes, *weight.factors, out)


def _has_half_scales(weight: QuantizedWeight) -> bool:
    """Whether the weight is in bytes with float16 scales only, as Q8_0 is."""
    return weight.form.bits == 8 and weight.form.scale is np.float16 and not weight.form.has_minimum


def _scales(weight: QuantizedWeight) -> np.ndarray:
    """The scales in the form that the 8-bit kernels need."""
    return contiguous(weight.scale).view(np.uint16) if HALF_FLOATS else weight.factors[0]


def _written(weight: QuantizedWeight, rows: slice) -> np.ndarray:
    """Some rows of the weight (out, in), as float32."""
    out = empty((rows.stop - rows.start, weight.shape[1]))
    codes = contiguous(weight.codes[rows])
    if _has_half_scales(weight):
        _write8(codes, _scales(weight)[rows], out)
    else:
        scale, minimum = weight.factors
        (_write4 if weight.form.bits == 4 else _write_bytes)(codes, scale[rows], minimum[rows], out)
    return out


def _parts(weight: QuantizedWeight) -> list[slice]:
    step = max(PART // weight.shape[1], 1)
    return [slice(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step)]


def quantized_product(x: np.ndarray, weight: FrozenWeight, bias: np.ndarray, skip: np.ndarray, y: np.ndarray) -> None:
    """y = x wᵗ + b + skip: (N, in) -> (N, out). `bias` and `skip` may be empty."""
    if isinstance(weight, HalfWeight):
        bits, kernels = contiguous(weight.bits), half.HALF[weight.kind]
        if x.shape[0] <= FEW_DOTS:
            kernels.dots(x, bits, bias, skip, scratch(threads(), y.size), y)
        else:
            kernels.product(x, bits.T, y, bias, skip, scratch(threads(), half.SCRATCH))
        return
    assert isinstance(weight, QuantizedWeight)
    few = x.shape[0] <= (SEVERAL if _has_half_scales(weight) else FEW)
    (_dots if few else _many_rows)(x, weight, bias, skip, y)


def _dots(x: np.ndarray, weight: QuantizedWeight, bias: np.ndarray, skip: np.ndarray, y: np.ndarray) -> None:
    """A few rows, multiplied directly with the codes."""
    codes = contiguous(weight.codes)
    if _has_half_scales(weight):
        _dots8(x, codes, _scales(weight), bias, skip, scratch(threads(), y.size), y)
        return
    scale, minimum = weight.factors
    if weight.form.bits == 4:
        _dots4(x, codes, scale, minimum, bias, skip, scratch(threads(), y.size), y)
        return
    sums = empty((x.shape[0], codes.shape[1])) if minimum.size else minimum
    if minimum.size:
        _block_sums(x, sums)
    _dots_of_bytes(x, codes, scale, minimum, sums, bias, skip, y)


def _many_rows(x: np.ndarray, weight: QuantizedWeight, bias: np.ndarray, skip: np.ndarray, y: np.ndarray) -> None:
    for part in _parts(weight):
        beside = skip[:, part] if skip.size else skip
        product(x, _written(weight, part).T, bias[part], beside, out=y[:, part])


def quantized_input_gradient(dy: np.ndarray, weight: FrozenWeight, dx: np.ndarray) -> None:
    """dx = dy w: (N, out) -> (N, in)."""
    if isinstance(weight, HalfWeight):
        space = scratch(threads(), half.SCRATCH)
        half.HALF[weight.kind].product(dy, contiguous(weight.bits), dx, NO_ROW, NO_ROWS, space)
        return
    assert isinstance(weight, QuantizedWeight)
    for part in _parts(weight):
        product(dy[:, part], _written(weight, part), out=dx, accumulate=part.start > 0)


KERNELS = (
    *products.KERNELS, *half.KERNELS, _block_sums, _dots8, _dots4, _dots_of_bytes, _write8, _write4, _write_bytes,
    _gather8, _gather4, _gather_bytes,
)  # fmt: skip
