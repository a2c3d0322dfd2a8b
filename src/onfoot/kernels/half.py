"""Products with 16-bit weights: half the memory, and half the time to read it.

A few rows are multiplied directly, as `few_rows` does with float32: each number is widened, exactly, when it is read.
For many rows, the matrix product widens each block of the weight before it packs it. Either way an entry is the sum of
the same products in the same order as with the same weight in float32, so that it has the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from onfoot.kernels.codes import bfloat16_dots, float16_dots
from onfoot.kernels.cpu import HALF_FLOATS
from onfoot.kernels.elementary import F
from onfoot.kernels.few_rows import dots_kernel
from onfoot.kernels.jit import Kernel, exact, inner, intrinsic, kernel, types
from onfoot.kernels.matrix import FLOAT, Matrix, matrix, part
from onfoot.kernels.product import COLUMNS, DEPTH, ROWS_SCRATCH, depth_step, pack_b, put_rows
from onfoot.kernels.product import SCRATCH as PRODUCT_SCRATCH
from onfoot.kernels.shapes import thread_range
from onfoot.kernels.simd import TILE_COLUMNS, address, float_from_bits, floats, shorts

SHORT = 2  # bytes per 16-bit number
STRIP = 192  # columns widened at a time: DEPTH × STRIP floats stay in L2; a multiple of every TILE_COLUMNS
SCRATCH = PRODUCT_SCRATCH + DEPTH * STRIP  # floats per thread


@inner
def _from_bfloat16(bits: int) -> float:
    """A bfloat16 is the upper half of a float32."""
    return float_from_bits(np.int32(np.int32(bits) << np.int32(16)))


@intrinsic
def _from_float16_in_hardware(typing: Any, bits: Any) -> Any:
    """The float32 of a float16, in one instruction."""

    def build(context: Any, build: Any, signature: Any, args: Any) -> Any:
        return build.fpext(build.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), build


@exact
def _from_float16_by_hand(bits: int) -> float:
    """The same on CPUs without the instruction: exponent and fraction moved, and 2¹¹² for the other exponent bias."""
    magnitude = np.int32((np.int32(bits) & np.int32(0x7FFF)) << np.int32(13))
    special = np.int32(0x7F800000) if magnitude >= np.int32(0x0F800000) else np.int32(0)  # infinity and NaN
    made = float_from_bits(np.int32(magnitude | special)) * F(2.0**112)
    return -made if np.int32(bits) & np.int32(0x8000) else made


class _Kernels(NamedTuple):
    """The kernels of one 16-bit type."""

    dots: Kernel
    product: Kernel
    gather: Kernel


def _made(name: str, dots: Any, widen: Any) -> _Kernels:
    """The kernels for 16-bit numbers that `widen` converts."""

    @inner
    def widen_block(b: Matrix, depth: int, columns: int, to: int) -> Matrix:
        """A block of b (depth × columns) as floats at the address `to`, in the order in which it is stored."""
        by_rows = b.column == SHORT
        n, length = (depth, columns) if by_rows else (columns, depth)
        for i in range(n):
            row = shorts(b.at + i * (b.row if by_rows else b.column), length)
            out = floats(to + i * length * FLOAT, length)
            for k in range(length):
                out[k] = widen(row[k])  # eq QUANT.4
        return Matrix(to, length * FLOAT, FLOAT) if by_rows else Matrix(to, FLOAT, length * FLOAT)

    @kernel(
        "f4[:,::1], u2[:,:], f4[:,::1], f4[:], f4[:,:], f4[:,:]",
        "m k, k n, m n, n?, m n?, threads .",
        f"{name}_product",
    )
    def product(
        a: np.ndarray,
        b: np.ndarray,
        c: np.ndarray,
        bias: np.ndarray,
        skip: np.ndarray,
        work: np.ndarray,
        thread: int,
        threads: int,
    ) -> None:
        """c = a b + bias + skip, for b with contiguous rows or columns: `multiply` of `product` with this b."""
        first, last = thread_range(c.shape[1], TILE_COLUMNS, thread, threads)
        space = address(work) + thread * work.strides[0]
        packed_b = space + ROWS_SCRATCH * FLOAT
        wide = packed_b + DEPTH * COLUMNS * FLOAT
        rows, depth = a.shape
        step = depth_step(depth)
        for j0 in range(first, last, COLUMNS):
            nc = min(COLUMNS, last - j0)
            to = part(matrix(c), 0, j0)
            for k0 in range(0, depth, step):
                kc = min(step, depth - k0)
                for s in range(0, nc, STRIP):
                    ns = min(STRIP, nc - s)
                    strip = widen_block(part(matrix(b), k0, j0 + s), kc, ns, wide)
                    pack_b(strip, kc, ns, packed_b + s * kc * FLOAT)
                beside, added = 0, to
                if k0 == 0:
                    beside = address(bias) + j0 * FLOAT if bias.size else 0
                    added = part(matrix(skip), 0, j0) if skip.size else Matrix(0, 0, FLOAT)
                put_rows(rows, nc, kc, part(matrix(a), 0, k0), 0, packed_b, to, beside, added, space)

    @kernel("i8[::1], u2[:,::1], f4[:,::1]", "n, v c, n c", f"{name}_gather")
    def gather(ids: np.ndarray, weight: np.ndarray, out: np.ndarray, thread: int, threads: int) -> None:
        first, last = thread_range(ids.size, 1, thread, threads)
        for i in range(first, last):
            row, to = weight[ids[i]], out[i]
            for k in range(to.size):
                to[k] = widen(row[k])  # eq QUANT.4

    return _Kernels(dots_kernel(name, "u2", dots, widen), product, gather)


HALF = {
    "BF16": _made("bf16", bfloat16_dots, _from_bfloat16),
    "F16": _made("f16", float16_dots, _from_float16_in_hardware if HALF_FLOATS else _from_float16_by_hand),
}
KERNELS = (*HALF["BF16"], *HALF["F16"])
