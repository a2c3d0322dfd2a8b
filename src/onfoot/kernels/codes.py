"""Dot products of floats with quantized codes, as LLVM instructions: auto-vectorised code is several times slower.

A block is 32 codes with one scale; they are converted to floats in registers, eight or sixteen at a time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from onfoot.kernels.cpu import HALF_FLOATS, WIDTH
from onfoot.kernels.jit import cgutils, intrinsic, types
from onfoot.kernels.simd import AHEAD, BYTES, FLOAT, I32, VECTOR, _const, _load, _pointer, _prefetch
from onfoot.quantized import BLOCK

INTEGERS = ir.VectorType(I32, WIDTH)
CODES = ir.VectorType(ir.IntType(8), WIDTH)
ROWS = 4  # rows of x that `dots8` computes at a time
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


def _splat(build: Any, value: Any) -> Any:
    one = build.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return build.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * WIDTH))


def _sum(build: Any, vector: Any) -> Any:
    parts = [build.extract_element(vector, ir.Constant(I32, i)) for i in range(WIDTH)]
    while len(parts) > 1:
        parts = [build.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _scale(build: Any, scale: Any, block: Any) -> Any:
    """A block's scale, from float16 if the CPU converts it in hardware, otherwise from float32."""
    if not HALF_FLOATS:
        return _float(build, scale, block)
    bits = build.load(_pointer(build, build.add(scale, build.mul(block, _const(2))), ir.IntType(16)))
    return build.fpext(build.bitcast(bits, ir.HalfType()), FLOAT)


def _float(build: Any, scale: Any, block: Any) -> Any:
    return build.load(_pointer(build, build.add(scale, build.mul(block, _const(BYTES))), FLOAT))


def _dot(build: Any, args: Any, widened: Any, size: int, scaled: Any, block: int = BLOCK) -> Any:
    """Σ over blocks of scale · Σ x code; `widened(codes, j)` are the j-th floats of a block of `size` bytes."""
    x, codes, scale, blocks = args
    fma = cgutils.get_or_insert_function(
        build.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fmuladd.v{WIDTH}f32"
    )
    total = cgutils.alloca_once_value(build, ZERO)
    with cgutils.for_range(build, blocks) as loop:
        at_x = build.add(x, build.mul(loop.index, _const(block * BYTES)))
        at_codes = build.add(codes, build.mul(loop.index, _const(size)))
        _prefetch(build, build.add(at_codes, _const(AHEAD)), write=0)
        sums = [ZERO, ZERO]
        for j in range(block // WIDTH):
            left = _load(build, at_x, j * WIDTH * BYTES)
            sums[j % 2] = build.call(fma, [left, widened(at_codes, j), sums[j % 2]])
        factor = _splat(build, scaled(build, scale, loop.index))
        build.store(build.call(fma, [build.fadd(*sums), factor, build.load(total)]), total)
    return _sum(build, build.load(total))


@intrinsic
def dots8(typing: Any, x: Any, x_row: Any, codes: Any, scale: Any, blocks: Any, out: Any) -> Any:
    """Writes the `dot8` of ROWS rows of x, x_row bytes apart. Each code is converted once for all rows."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        x, x_row, codes, scale, blocks, out = args
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        fma = cgutils.get_or_insert_function(build.module, kind, f"llvm.fmuladd.v{WIDTH}f32")
        rows = [build.add(x, build.mul(x_row, _const(i))) for i in range(ROWS)]
        totals = [cgutils.alloca_once_value(build, ZERO) for _ in rows]
        with cgutils.for_range(build, blocks) as loop:
            at = build.mul(loop.index, _const(BLOCK * BYTES))
            at_codes = build.add(codes, build.mul(loop.index, _const(BLOCK)))
            _prefetch(build, build.add(at_codes, _const(AHEAD)), write=0)
            factor = _splat(build, _scale(build, scale, loop.index))
            sums = [build.load(total) for total in totals]
            for j in range(BLOCK // WIDTH):
                bytes_ = build.load(_pointer(build, at_codes, CODES, j * WIDTH), align=1)
                weight = build.fmul(build.sitofp(build.sext(bytes_, INTEGERS), VECTOR), factor)
                for i, row in enumerate(rows):
                    left = _load(build, build.add(row, at), j * WIDTH * BYTES)
                    sums[i] = build.call(fma, [left, weight, sums[i]])
            for total, value in zip(totals, sums, strict=True):
                build.store(value, total)
        for i, total in enumerate(totals):
            build.store(_sum(build, build.load(total)), _pointer(build, out, FLOAT, i * BYTES))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), build


def _dot_of_bytes(block: int, scaled: Any) -> Any:
    """The signature and the instructions of Σ x code scale over blocks of signed bytes."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        def widened(at: Any, j: int) -> Any:
            bytes_ = build.load(_pointer(build, at, CODES, j * WIDTH), align=1)
            return build.sitofp(build.sext(bytes_, INTEGERS), VECTOR)

        return _dot(build, args, widened, block, scaled, block)

    return types.float32(*[types.int64] * 4), build


@intrinsic
def dot8(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
    """Σ x code scale over blocks of 32 signed bytes. All arguments are addresses except the number of blocks."""
    return _dot_of_bytes(BLOCK, _scale)


@intrinsic
def dot8_32(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
    """`dot8` with float32 scales on any CPU."""
    return _dot_of_bytes(BLOCK, _float)


@intrinsic
def dot8_16(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
    """`dot8` with float32 scales, over blocks of 16."""
    return _dot_of_bytes(BLOCK // 2, _float)


@intrinsic
def dot4(typing: Any, x: Any, codes: Any, scale: Any, blocks: Any) -> Any:
    """`dot8` for 16 bytes with two codes each: entries 0–15 in the low halves, 16–31 in the high ones."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        def widened(at: Any, j: int) -> Any:
            first = j * WIDTH  # index within the block of 32
            bytes_ = build.load(_pointer(build, at, CODES, first % (BLOCK // 2)), align=1)
            wide = build.zext(bytes_, INTEGERS)
            if first < BLOCK // 2:
                codes = build.and_(wide, ir.Constant(INTEGERS, [15] * WIDTH))
            else:
                codes = build.lshr(wide, ir.Constant(INTEGERS, [4] * WIDTH))
            return build.sitofp(codes, VECTOR)

        return _dot(build, args, widened, BLOCK // 2, _float)

    return types.float32(*[types.int64] * 4), build


@intrinsic
def scale8(typing: Any, scale: Any, block: Any) -> Any:
    """The scale of a block, from the address of the first scale."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return _scale(build, *args)

    return types.float32(types.int64, types.int64), build
