"""Gaussian noise, added in one pass over memory: bits, logarithm, sine and cosine in vectors."""

from __future__ import annotations

import numpy as np

from onfoot.kernels.elementary import F, log
from onfoot.kernels.jit import exact, kernel
from onfoot.kernels.shapes import fall_back_to_formula, is_float32, thread_range
from onfoot.ops import noise as ops
from onfoot.ops.noise import GROUP, LANES, MASK, MULTIPLIERS, ROUNDS, STEPS

U = np.uint64
M0, M1, STEP0, STEP1, LOW = U(MULTIPLIERS[0]), U(MULTIPLIERS[1]), U(STEPS[0]), U(STEPS[1]), U(MASK)
HALF, ONE = U(32), U(1)


@exact
def normal_pair(radius_bits: int, angle_bits: int) -> tuple[float, float]:
    """Two independent normal numbers; the angle is reduced to a quarter turn around its nearest axis."""
    u = F(np.int32(radius_bits >> ONE)) * F(2**-31) + F(2**-32)
    radius = np.sqrt(F(-2) * log(u))  # eq EX.10
    turned = np.int32(angle_bits)
    quarter = np.int32((turned + np.int32(1 << 29)) >> np.int32(30))  # −2 ... 2
    t = F(np.int32(turned - (quarter << np.int32(30)))) * F(2**-30)  # eq EX.11, in quarter turns: [−½, ½)
    s = t * t
    sine = t * (F(1.5707964) + s * (F(-0.6459635) + s * (F(0.07968022) + s * F(-0.004602163))))
    cosine = F(0.2536692) + s * (F(-0.02086007) + s * F(0.00090362987))
    cosine = F(1) + s * (F(-1.2337005) + s * cosine)
    odd = (quarter & np.int32(1)) != 0
    x, y = (-sine if odd else cosine), (cosine if odd else sine)
    radius = -radius if (quarter & np.int32(2)) != 0 else radius
    return radius * x, radius * y  # eq EX.12


@kernel("f4[:,:,::1], f4, i8, i8, i8")
def _add_noise(
    groups: np.ndarray, deviation: float, low: int, high: int, first: int, thread: int, threads: int
) -> None:
    """`low` and `high` are the halves of the key, `first` the number of the first group."""
    begin, end = thread_range(groups.shape[0], 1, thread, threads)
    key0, key1 = U(low), U(high)
    for g in range(begin, end):
        x0, x1, x2, x3 = groups[g, 0], groups[g, 1], groups[g, 2], groups[g, 3]
        for i in range(LANES):  # Philox is written out here: as a function it would not become vectors
            counter, k0, k1 = U((first + g) * LANES + i), key0, key1
            a, b, c, d = counter & LOW, counter >> HALF, U(0), U(0)
            for _ in range(ROUNDS):
                p, q = M0 * a, M1 * c
                a, b, c, d = (q >> HALF) ^ b ^ k0, q & LOW, (p >> HALF) ^ d ^ k1, p & LOW
                k0, k1 = (k0 + STEP0) & LOW, (k1 + STEP1) & LOW
            z0, z1 = normal_pair(a, b)
            z2, z3 = normal_pair(c, d)
            x0[i] += deviation * z0
            x1[i] += deviation * z1
            x2[i] += deviation * z2
            x3[i] += deviation * z3


def add_noise(x: np.ndarray, deviation: float, key: int) -> None:
    """Adds noise of this standard deviation to x, in place, by a key of 64 bits."""
    if not is_float32(x) or not x.flags.carray or not 0 <= key < 1 << 64:
        fall_back_to_formula(ops.add_noise, x, deviation, key)
        return
    flat, full = x.reshape(-1), x.size // GROUP
    _add_noise(flat[: full * GROUP].reshape(full, 4, LANES), deviation, *ops.halves(key), 0)
    rest = flat[full * GROUP :]
    if rest.size:
        group = np.zeros((1, 4, LANES), np.float32)
        group.reshape(-1)[: rest.size] = rest
        _add_noise(group, deviation, *ops.halves(key), full)
        rest[:] = group.reshape(-1)[: rest.size]


KERNELS = (_add_noise,)
