"""Gaussian noise from counters: each number depends on a key and on its position alone.

So it is the same for any number of threads, and is added without being stored. Philox (Salmon et al. 2011) makes random
bits of counters, Box and Muller's formulas (1958) make normal numbers of random bits.
"""

from __future__ import annotations

import numpy as np

from onfoot.arrays import Array, to_numpy

LANES = 256  # counters of a group; each makes four numbers, LANES apart
GROUP = 4 * LANES
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # of the two halves of the key, from round to round
MASK = 0xFFFFFFFF
PART = 1 << 16  # groups whose noise is in memory at a time


def philox(counter: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four times 32 random bits for each 64-bit counter, by ten rounds of multiplying and mixing (Philox4x32-10)."""
    mask, half = np.uint64(MASK), np.uint64(32)
    counter = counter.astype(np.uint64)
    a, b, c, d = counter & mask, counter >> half, np.zeros_like(counter), np.zeros_like(counter)
    for r in range(ROUNDS):
        low, high = (np.uint64((part + r * step) & MASK) for part, step in zip(halves(key), STEPS, strict=True))
        first, second = np.uint64(MULTIPLIERS[0]) * a, np.uint64(MULTIPLIERS[1]) * c  # 64 bits each
        a, b, c, d = (second >> half) ^ b ^ low, second & mask, (first >> half) ^ d ^ high, first & mask
    return a, b, c, d


def halves(key: int) -> tuple[int, int]:
    """The lower and the upper 32 bits."""
    return key & MASK, key >> 32 & MASK


def normal_pair(radius_bits: np.ndarray, angle_bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two independent normal numbers from two times 32 random bits."""
    u = (np.floor(radius_bits / 2) + 0.5) * 2.0**-31  # in (0, 1)
    radius = np.sqrt(-2 * np.log(u))  # eq EX.10
    angle = 2 * np.pi * (angle_bits * 2.0**-32)  # eq EX.11
    return radius * np.cos(angle), radius * np.sin(angle)  # eq EX.12


def gaussian(group: int, n_groups: int, key: int) -> np.ndarray:
    """The normal numbers of some groups in float64, (n_groups × 1024,)."""
    counter = np.arange(group * LANES, (group + n_groups) * LANES).reshape(n_groups, LANES)
    a, b, c, d = philox(counter, key)
    return np.stack([*normal_pair(a, b), *normal_pair(c, d)], axis=1).reshape(-1)


def add_noise(x: Array, deviation: float, key: int) -> None:
    """Adds noise of this standard deviation to x, in place, by a key of 64 bits."""
    if not 0 <= key < 1 << 64:
        raise ValueError(f"key must have 64 bits, got {key}")
    values = to_numpy(x)  # the same memory
    if not values.flags.c_contiguous:
        raise ValueError(f"noise is added to an array in C order; this one has strides {values.strides}")
    flat = values.reshape(-1)
    for group in range(0, -(-flat.size // GROUP), PART):
        part = flat[group * GROUP : (group + PART) * GROUP]
        noise = gaussian(group, -(-part.size // GROUP), key)[: part.size]
        part += (deviation * noise).astype(part.dtype)
