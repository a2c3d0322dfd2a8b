"""Dot products of floats with quantized codes, as LLVM instructions: auto-vectorised code is several times slower.

A block is 32 codes with one scale; they are converted to floats in registers, eight or sixteen at a time.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir

from onfoot.kernels.cpu import HALF_FLOATS, WIDTH
from onfoot.kernels.jit import cgutils, exact, intrinsic, types
from onfoot.kernels.simd import AHEAD, BYTES, FLOAT, I32, VECTOR, _const, _load, _pointer, _prefetch, multiply_add
from onfoot.quantized import BLOCK

INTEGERS = ir.VectorType(I32, WIDTH)
CODES = ir.VectorType(ir.IntType(8), WIDTH)
MOST = 8 if WIDTH == 16 else 4  # rows of x whose sums fit in the registers
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


def _splat(build: Any, value: Any) -> Any:
    one = build.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return build.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * WIDTH))


def _sums(build: Any, vectors: list[Any]) -> Any:
    """The sums of the lanes of 1, 2, 4 or 8 vectors, as one vector with as many lanes.

    Halves of a vector are added until one lane is left, several vectors at a time: the order is that of each alone.
    """
    width = WIDTH
    while width > 1:
        width //= 2
        left = vectors[::2]
        right = vectors[1::2] or [ir.Constant(left[0].type, ir.Undefined)]
        lanes = [*range(left[0].type.count * min(2, len(vectors)))]
        halves = [lanes[i : i + width] for i in range(0, len(lanes), width)]
        low, high = (
            ir.Constant(ir.VectorType(I32, len(lanes) // 2), [lane for half in halves[k::2] for lane in half])
            for k in (0, 1)
        )
        vectors = [
            build.fadd(build.shuffle_vector(a, b, low), build.shuffle_vector(a, b, high))
            for a, b in zip(left, right, strict=True)
        ]
    return vectors[0]


def _scale(build: Any, scale: Any, block: Any) -> Any:
    """A block's scale, from float16 if the CPU converts it in hardware, otherwise from float32."""
    if not HALF_FLOATS:
        return _float(build, scale, block)
    bits = build.load(_pointer(build, build.add(scale, build.mul(block, _const(2))), ir.IntType(16)))
    return build.fpext(build.bitcast(bits, ir.HalfType()), FLOAT)


def _float(build: Any, scale: Any, block: Any) -> Any:
    return build.load(_pointer(build, build.add(scale, build.mul(block, _const(BYTES))), FLOAT))


def _eight_bits(build: Any, codes: Any, scale: Any, minimum: Any, block: Any) -> tuple[Any, Any]:
    """How to read the j-th vector of a block of 32 signed bytes, and the factor of their sum."""
    at = build.add(codes, build.mul(block, _const(BLOCK)))
    _prefetch(build, build.add(at, _const(AHEAD)), write=0)

    def weight(j: int) -> Any:
        bytes_ = build.load(_pointer(build, at, CODES, j * WIDTH), align=1)
        return build.sitofp(build.sext(bytes_, INTEGERS), VECTOR)

    return weight, _splat(build, _scale(build, scale, block))


def _four_bits(build: Any, codes: Any, scale: Any, minimum: Any, block: Any) -> tuple[Any, Any]:
    """The same for 16 bytes with two codes each: entries 0–15 in the low halves, 16–31 in the high ones. No factor."""
    at = build.add(codes, build.mul(block, _const(BLOCK // 2)))
    _prefetch(build, build.add(at, _const(AHEAD)), write=0)
    factor, shift = (_splat(build, _float(build, where, block)) for where in (scale, minimum))

    def weight(j: int) -> Any:
        first = j * WIDTH  # index within the block of 32
        bytes_ = build.load(_pointer(build, at, CODES, first % (BLOCK // 2)), align=1)
        wide = build.zext(bytes_, INTEGERS)
        if first < BLOCK // 2:
            code = build.and_(wide, ir.Constant(INTEGERS, [15] * WIDTH))
        else:
            code = build.lshr(wide, ir.Constant(INTEGERS, [4] * WIDTH))
        return multiply_add(build, build.sitofp(code, VECTOR), factor, shift)  # eq QUANT.2, QUANT.3

    return weight, None


def _dots(weights: Any, rows: int) -> Any:
    """The code that writes Σ x w of some rows of x, each with the same order of sums for any number of rows.

    A weight is converted once for all rows. All sums are chains of multiply-adds: of any other, LLVM may fuse some.
    """
    chains = 1 if weights is _eight_bits else 2  # per row; two, so that an addition need not wait for the one before

    def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
        x, x_row, codes, scale, minimum, blocks, out = args
        begins = [build.add(x, build.mul(x_row, _const(i))) for i in range(rows)]
        totals = [[cgutils.alloca_once_value(build, ZERO) for _ in range(chains)] for _ in begins]
        with cgutils.for_range(build, blocks) as loop:
            at = build.mul(loop.index, _const(BLOCK * BYTES))
            weight, factor = weights(build, codes, scale, minimum, loop.index)
            sums = [[ZERO if factor else build.load(total) for total in pair] for pair in totals]
            for j in range(BLOCK // WIDTH):
                right = weight(j)
                for begin, pair in zip(begins, sums, strict=True):
                    left = _load(build, build.add(begin, at), j * WIDTH * BYTES)
                    pair[j % chains] = multiply_add(build, left, right, pair[j % chains])
            for pair, values in zip(totals, sums, strict=True):
                for total, value in zip(pair, values, strict=True):
                    build.store(multiply_add(build, value, factor, build.load(total)) if factor else value, total)
        sums_of_lanes = _sums(build, [reduce(build.fadd, [build.load(one) for one in pair]) for pair in totals])
        build.store(sums_of_lanes, _pointer(build, out, sums_of_lanes.type), align=BYTES)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), code


def _dots_of(weights: Any, rows: int) -> Any:
    """The intrinsic with the code of `_dots`."""

    def dots(typing: Any, x: Any, x_row: Any, codes: Any, scale: Any, minimum: Any, blocks: Any, out: Any) -> Any:
        return _dots(weights, rows)

    return intrinsic(dots)


_most8, _four8, _two8, _one8 = (_dots_of(_eight_bits, rows) for rows in (MOST, 4, 2, 1))
_most4, _four4, _two4, _one4 = (_dots_of(_four_bits, rows) for rows in (MOST, 4, 2, 1))

# `exact`: LLVM may not reorder the sums, so that they are bitwise the same for one row and for several.


@exact
def dots8(m: int, x: int, x_row: int, codes: int, scale: int, blocks: int, out: int) -> None:
    """Writes Σ x code scale over blocks of 32 signed bytes, for m rows of x that are x_row bytes apart.

    All other arguments but the number of blocks are addresses.
    """
    i = 0
    while i + MOST <= m:
        _most8(x + i * x_row, x_row, codes, scale, 0, blocks, out + i * 4)
        i += MOST
    if i + 4 <= m:
        _four8(x + i * x_row, x_row, codes, scale, 0, blocks, out + i * 4)
        i += 4
    if i + 2 <= m:
        _two8(x + i * x_row, x_row, codes, scale, 0, blocks, out + i * 4)
        i += 2
    if i < m:
        _one8(x + i * x_row, x_row, codes, scale, 0, blocks, out + i * 4)


@exact
def dots4(m: int, x: int, x_row: int, codes: int, scale: int, minimum: int, blocks: int, out: int) -> None:
    """`dots8` for two codes per byte: Σ x (code scale + minimum)."""
    i = 0
    while i + MOST <= m:
        _most4(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)
        i += MOST
    if i + 4 <= m:
        _four4(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)
        i += 4
    if i + 2 <= m:
        _two4(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)
        i += 2
    if i < m:
        _one4(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)


def _dot_of_bytes(block: int) -> Any:
    """The intrinsic of Σ x code scale over blocks of signed bytes with float32 scales, for one row of x."""

    def dot(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
        def code(context: Any, build: Any, signature: Any, args: Any) -> Any:
            x, codes, scale, blocks = args
            total = cgutils.alloca_once_value(build, ZERO)
            with cgutils.for_range(build, blocks) as loop:
                at_x = build.add(x, build.mul(loop.index, _const(block * BYTES)))
                at = build.add(codes, build.mul(loop.index, _const(block)))
                _prefetch(build, build.add(at, _const(AHEAD)), write=0)
                sums = [ZERO, ZERO]
                for j in range(block // WIDTH):
                    bytes_ = build.load(_pointer(build, at, CODES, j * WIDTH), align=1)
                    right = build.sitofp(build.sext(bytes_, INTEGERS), VECTOR)
                    left = _load(build, at_x, j * WIDTH * BYTES)
                    sums[j % 2] = multiply_add(build, left, right, sums[j % 2])
                factor = _splat(build, _float(build, scale, loop.index))
                build.store(multiply_add(build, build.fadd(*sums), factor, build.load(total)), total)
            return build.extract_element(_sums(build, [build.load(total)]), ir.Constant(I32, 0))

        return types.float32(*[types.int64] * 4), code

    return intrinsic(dot)


dot8_32, dot8_16 = _dot_of_bytes(BLOCK), _dot_of_bytes(BLOCK // 2)


@intrinsic
def scale8(typing: Any, scale: Any, block: Any) -> Any:
    """The scale of a block, from the address of the first scale."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return _scale(build, *args)

    return types.float32(types.int64, types.int64), build
