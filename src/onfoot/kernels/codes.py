"""Dot products of floats with weights in 4 to 32 bits, as LLVM instructions: auto-vectorised code is slower.

A block is 32 weights, of codes with one scale; they are converted to floats in registers, eight or sixteen at a time.
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
LINE = 64  # bytes per line of the caches
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


def _shorts(build: Any, at: Any, j: int) -> Any:
    """The j-th vector of a block of 16-bit numbers, as integers of 32 bits."""
    kind = ir.VectorType(ir.IntType(16), WIDTH)
    return build.zext(build.load(_pointer(build, at, kind, j * WIDTH * 2), align=2), INTEGERS)


def _all(number: int) -> Any:
    return ir.Constant(INTEGERS, [number] * WIDTH)


def _block(build: Any, weights: Any, block: Any, size: int) -> Any:
    """The address of a block of 32 numbers of `size` bytes; what is read later is prefetched."""
    at = build.add(weights, build.mul(block, _const(BLOCK * size)))
    for line in range(0, BLOCK * size, LINE):
        _prefetch(build, build.add(at, _const(AHEAD + line)), write=0)
    return at


def _float32(build: Any, weights: Any, scale: Any, minimum: Any, block: Any) -> tuple[Any, Any]:
    """How to read the j-th vector of a block of 32 floats. No factor."""
    at = _block(build, weights, block, BYTES)
    return (lambda j: _load(build, at, j * WIDTH * BYTES)), None


def _bfloat16(build: Any, weights: Any, scale: Any, minimum: Any, block: Any) -> tuple[Any, Any]:
    """The same for bfloat16, which is the upper half of a float32."""
    at = _block(build, weights, block, 2)
    return (lambda j: build.bitcast(build.shl(_shorts(build, at, j), _all(16)), VECTOR)), None  # eq QUANT.4


def _float16(build: Any, weights: Any, scale: Any, minimum: Any, block: Any) -> tuple[Any, Any]:
    """The same for float16, converted in hardware or, where there is no instruction, by integers."""
    at = _block(build, weights, block, 2)

    def weight(j: int) -> Any:
        if HALF_FLOATS:
            kind = ir.VectorType(ir.HalfType(), WIDTH)
            return build.fpext(build.load(_pointer(build, at, kind, j * WIDTH * 2), align=2), VECTOR)  # eq QUANT.4
        bits = _shorts(build, at, j)
        magnitude = build.shl(build.and_(bits, _all(0x7FFF)), _all(13))
        special = build.icmp_signed(">=", magnitude, _all(0x0F800000))  # infinity and NaN
        exponent = build.select(special, _all(0x7F800000), _all(0))
        bias = ir.Constant(VECTOR, [2.0**112] * WIDTH)  # of the other exponents
        made = build.fmul(build.bitcast(build.or_(magnitude, exponent), VECTOR), bias)
        sign = build.shl(build.and_(bits, _all(0x8000)), _all(16))
        return build.bitcast(build.or_(build.bitcast(made, INTEGERS), sign), VECTOR)  # eq QUANT.4

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


def _any_rows(weights: Any) -> Any:
    """The function that writes Σ x w over blocks of 32 weights, for m rows of x that are x_row bytes apart.

    All other arguments but the number of blocks are addresses. `exact`: LLVM may not reorder the sums, so that they are
    bitwise the same for one row and for several.
    """
    most, four, two, one = (_dots_of(weights, rows) for rows in (MOST, 4, 2, 1))

    @exact
    def dots(m: int, x: int, x_row: int, codes: int, scale: int, minimum: int, blocks: int, out: int) -> None:
        i = 0
        while i + MOST <= m:
            most(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)
            i += MOST
        if i + 4 <= m:
            four(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)
            i += 4
        if i + 2 <= m:
            two(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)
            i += 2
        if i < m:
            one(x + i * x_row, x_row, codes, scale, minimum, blocks, out + i * 4)

    return dots


dots8 = _any_rows(_eight_bits)  # Σ x code scale, of signed bytes; no minimum
dots4 = _any_rows(_four_bits)  # Σ x (code scale + minimum), of two codes per byte
float32_dots, bfloat16_dots, float16_dots = (_any_rows(kind) for kind in (_float32, _bfloat16, _float16))


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
