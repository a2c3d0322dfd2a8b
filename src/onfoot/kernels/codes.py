"""Dot products of floats with quantized codes, as LLVM instructions: auto-vectorised code is several times slower.

A block is 32 codes with one scale; they are converted to floats in registers, eight or sixteen at a time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onfoot.kernels.cpu import HALF_FLOATS, WIDTH
from onfoot.kernels.jit import cgutils, exact, intrinsic, types
from onfoot.kernels.simd import AHEAD, BYTES, FLOAT, I32, VECTOR, _const, _load, _pointer, _prefetch
from onfoot.quantized import BLOCK

INTEGERS = ir.VectorType(I32, WIDTH)
CODES = ir.VectorType(ir.IntType(8), WIDTH)
ROWS = 4  # rows of x that `dots8` and `dots4` compute at a time
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


def _splat(build: Any, value: Any) -> Any:
    one = build.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return build.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * WIDTH))


def _sum(build: Any, vector: Any) -> Any:
    """The sum of a vector's lanes: its halves are added until one lane is left."""
    width = WIDTH
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(I32, width), [*range(i, i + width)]) for i in (0, width))
        undefined = ir.Constant(vector.type, ir.Undefined)
        vector = build.fadd(build.shuffle_vector(vector, undefined, low), build.shuffle_vector(vector, undefined, high))
    return build.extract_element(vector, ir.Constant(I32, 0))


def _scale(build: Any, scale: Any, block: Any) -> Any:
    """A block's scale, from float16 if the CPU converts it in hardware, otherwise from float32."""
    if not HALF_FLOATS:
        return _float(build, scale, block)
    bits = build.load(_pointer(build, build.add(scale, build.mul(block, _const(2))), ir.IntType(16)))
    return build.fpext(build.bitcast(bits, ir.HalfType()), FLOAT)


def _float(build: Any, scale: Any, block: Any) -> Any:
    return build.load(_pointer(build, build.add(scale, build.mul(block, _const(BYTES))), FLOAT))


def _dots(build: Any, x: list[Any], codes: Any, scale: Any, blocks: Any, widened: Any, size: int, scaled: Any) -> Any:
    """Σ over blocks of scale · Σ x code for each row of x: bitwise the same for any number of rows.

    Each sum is one chain of multiply-adds: of a sum of two products, LLVM may fuse either.
    `widened(codes, j)` are the j-th floats of a block of `size` bytes; they are converted once for all rows.
    """
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(build.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
    totals = [cgutils.alloca_once_value(build, ZERO) for _ in x]
    with cgutils.for_range(build, blocks) as loop:
        at = build.mul(loop.index, _const(BLOCK * BYTES))
        at_codes = build.add(codes, build.mul(loop.index, _const(size)))
        _prefetch(build, build.add(at_codes, _const(AHEAD)), write=0)
        sums = [ZERO for _ in x]
        for j in range(BLOCK // WIDTH):
            weight = widened(at_codes, j)
            for i, row in enumerate(x):
                left = _load(build, build.add(row, at), j * WIDTH * BYTES)
                sums[i] = build.call(fma, [left, weight, sums[i]])
        factor = _splat(build, scaled(build, scale, loop.index))
        for total, value in zip(totals, sums, strict=True):
            build.store(build.call(fma, [value, factor, build.load(total)]), total)
    return [_sum(build, build.load(total)) for total in totals]


def _one_row(kind: Any) -> Any:
    """The code of a dot product of one row, which returns it."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        x, codes, scale, blocks = args
        return _dots(build, [x], codes, scale, blocks, *kind(build))[0]

    return types.float32(*[types.int64] * 4), build


def _several_rows(kind: Any) -> Any:
    """The code of the dot products of ROWS rows, which writes them."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        x, x_row, codes, scale, blocks, out = args
        rows = [build.add(x, build.mul(x_row, _const(i))) for i in range(ROWS)]
        for i, total in enumerate(_dots(build, rows, codes, scale, blocks, *kind(build))):
            build.store(total, _pointer(build, out, FLOAT, i * BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), build


def _eight_bits(build: Any) -> tuple[Any, int, Any]:
    """How blocks of 32 signed bytes are read."""

    def widened(at: Any, j: int) -> Any:
        bytes_ = build.load(_pointer(build, at, CODES, j * WIDTH), align=1)
        return build.sitofp(build.sext(bytes_, INTEGERS), VECTOR)

    return widened, BLOCK, _scale


def _four_bits(build: Any) -> tuple[Any, int, Any]:
    """How blocks of 16 bytes with two codes each are read: entries 0–15 in the low halves, 16–31 in the high ones."""

    def widened(at: Any, j: int) -> Any:
        first = j * WIDTH  # index within the block of 32
        bytes_ = build.load(_pointer(build, at, CODES, first % (BLOCK // 2)), align=1)
        wide = build.zext(bytes_, INTEGERS)
        if first < BLOCK // 2:
            codes = build.and_(wide, ir.Constant(INTEGERS, [15] * WIDTH))
        else:
            codes = build.lshr(wide, ir.Constant(INTEGERS, [4] * WIDTH))
        return build.sitofp(codes, VECTOR)

    return widened, BLOCK // 2, _float


@intrinsic
def _dot8(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
    return _one_row(_eight_bits)


@intrinsic
def _dots8(typing: Any, x: Any, x_row: Any, codes: Any, scale: Any, blocks: Any, out: Any) -> Any:
    return _several_rows(_eight_bits)


@intrinsic
def _dot4(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
    return _one_row(_four_bits)


@intrinsic
def _dots4(typing: Any, x: Any, x_row: Any, codes: Any, scale: Any, blocks: Any, out: Any) -> Any:
    return _several_rows(_four_bits)


# `exact`: LLVM may not reorder their sums, so that one row and several have the same.


@exact
def dot8(x: int, codes: int, scale: int, blocks: int) -> float:
    """Σ x code scale over blocks of 32 signed bytes. All arguments are addresses except the number of blocks."""
    return _dot8(x, codes, scale, blocks)


@exact
def dots8(x: int, x_row: int, codes: int, scale: int, blocks: int, out: int) -> None:
    """Writes the `dot8` of ROWS rows of x, x_row bytes apart. Each code is converted once for all rows."""
    _dots8(x, x_row, codes, scale, blocks, out)


@exact
def dot4(x: int, codes: int, scale: int, blocks: int) -> float:
    """`dot8` for two codes per byte."""
    return _dot4(x, codes, scale, blocks)


@exact
def dots4(x: int, x_row: int, codes: int, scale: int, blocks: int, out: int) -> None:
    """Writes the `dot4` of ROWS rows of x, x_row bytes apart. Each code is converted once for all rows."""
    _dots4(x, x_row, codes, scale, blocks, out)


@intrinsic
def scale8(typing: Any, scale: Any, block: Any) -> Any:
    """The scale of a block, from the address of the first scale."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return _scale(build, *args)

    return types.float32(types.int64, types.int64), build
