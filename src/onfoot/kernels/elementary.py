"""exp, log and erf as polynomials that LLVM vectorises; Numba's own are one call per element.

The coefficients are minimax fits; with rounding, exp and log are accurate to 1e-7 (relative), erf to 1e-7 (absolute).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from onfoot.kernels.cpu import WIDTH
from onfoot.kernels.jit import exact
from onfoot.kernels.simd import VECTOR, bits_from_float, float_from_bits, multiply_add

F = np.float32
LOG2_E = F(1.4426950408889634)
LN2_HIGH, LN2_LOW = F(0.693145751953125), F(1.4286068203094172e-06)  # their sum is ln 2; the first is exact in products
ROUNDER = F(12582912.0)  # 1.5 · 2²³: adding it leaves the nearest integer in the lowest bits
COEFFICIENTS = 0.0013814467238262296, 0.008368780836462975, 0.04166839271783829, 0.1666651964187622, 0.4999999403953552
C0, C1, C2, C3, C4 = map(F, COEFFICIENTS)  # of r⁶ ... r²
SQRT_HALF_BITS = np.int32(0x3F3504F3)
MANTISSA, EXPONENT = np.int32(0x7FFFFF), np.int32(23)


@exact
def exp(x: float) -> float:
    """2ⁿ exp(r) with x = n ln 2 + r; below −87.3 it stays at 1e-38, and NaN stays NaN."""
    x = F(-87.3) if x < F(-87.3) else x
    x = F(88.3) if x > F(88.3) else x
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = C1 + r * C0
    p = C2 + r * p
    p = C3 + r * p
    p = C4 + r * p
    p = F(1) + (r + r * r * p)
    made = float_from_bits(np.int32(bits_from_float(p) + (bits_from_float(shifted) << np.int32(23))))
    return made if x == x else x


def exp_of_vector(build: Any, x: Any) -> Any:
    """`exp` of a vector, in LLVM instructions."""

    def same(number: float) -> Any:
        return ir.Constant(VECTOR, [float(number)] * WIDTH)

    x = build.select(build.fcmp_ordered("<", x, same(-87.3)), same(-87.3), x)
    x = build.select(build.fcmp_ordered(">", x, same(88.3)), same(88.3), x)
    shifted = multiply_add(build, x, same(LOG2_E), same(ROUNDER))
    n = build.fsub(shifted, same(ROUNDER))
    r = multiply_add(build, n, same(-LN2_HIGH), x)
    r = multiply_add(build, n, same(-LN2_LOW), r)
    p = same(COEFFICIENTS[0])
    for c in COEFFICIENTS[1:]:
        p = multiply_add(build, r, p, same(c))
    p = build.fadd(same(1.0), multiply_add(build, build.fmul(r, r), p, r))
    bits = ir.VectorType(ir.IntType(32), WIDTH)
    power = build.shl(build.bitcast(shifted, bits), ir.Constant(bits, [23] * WIDTH))
    made = build.bitcast(build.add(build.bitcast(p, bits), power), VECTOR)
    return build.select(build.fcmp_ordered("==", x, x), made, x)


@exact
def log(x: float) -> float:
    """ln x of a normal positive number: e ln 2 + ln(1 + f) with 1 + f in [√½, √2)."""
    bits = np.int32(bits_from_float(x) - SQRT_HALF_BITS)
    e = F(bits >> EXPONENT)
    f = float_from_bits(np.int32((bits & MANTISSA) + SQRT_HALF_BITS)) - F(1)
    p = F(0.12712307) + f * F(-0.081015587)
    p = F(0.14202175) + f * (F(-0.12972239) + f * p)
    p = F(0.20001468) + f * (F(-0.16642247) + f * p)
    p = F(0.33333328) + f * (F(-0.25000298) + f * p)
    s = f * f
    return e * LN2_HIGH + (f + (e * LN2_LOW + s * (f * p - F(0.5))))


@exact
def erf(x: float) -> float:
    """The error function: a polynomial in x² up to 1, and 1 − exp(polynomial) beyond."""
    t = abs(x)
    s = x * x
    near = F(0.0051883277) + s * (F(-0.00080101937) + s * F(7.8538607e-05))
    near = F(0.112835854) + s * (F(-0.026853813) + s * near)
    near = x * (F(1.1283791) + s * (F(-0.37612626) + s * near))
    t = F(4) if t > F(4) else t  # 1 in float32 from there on
    far = F(-0.021856304) + t * (F(0.0029518749) + t * F(-0.00018677679))
    far = F(0.63809359) + t * (F(0.10314795) + t * far)
    far = F(0.00033269203) + t * (F(1.1271225) + t * far)
    far = F(1) - exp(-far)
    return near if t < F(1) else (-far if x < F(0) else far)
