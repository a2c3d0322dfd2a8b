"""Noise from counters: Philox against its published answers, the distribution against the normal one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onfoot.engine import get_engine
from onfoot.ops import noise
from onfoot.recording import pool

KEY = 0x0123456789ABCDEF


def drawn(engine: str, size: int, key: int = KEY, dtype: str = "float64") -> np.ndarray:
    x = np.zeros(size, dtype)
    get_engine(engine).add_noise(x, 1.0, key)
    return x


def cdf(x: np.ndarray) -> np.ndarray:
    """P(normal < x)."""
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])


def test_philox_gives_the_published_answers() -> None:
    # known answers of philox4x32-10 from the authors' Random123: for counters whose upper half is 0
    found = [int(x[0]) for x in noise.philox(np.array([0]), 0)]
    assert [f"{x:08x}" for x in found] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_philox_is_the_generator_written_in_plain_integers() -> None:
    def plain(counter: int, key: int) -> list[int]:
        c, k = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [key & 0xFFFFFFFF, key >> 32]
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [q >> 32 ^ c[1] ^ k[0], q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k[1], p & 0xFFFFFFFF]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        return c

    counters = [0, 1, 7, 2**32 - 1, 2**32, 2**62 + 12345]
    for key in (0, 1, KEY, 2**64 - 1):
        found = noise.philox(np.array(counters), key)
        for i, counter in enumerate(counters):
            assert [int(x[i]) for x in found] == plain(counter, key)


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_the_distribution_is_normal(engine: str) -> None:
    x = np.sort(drawn(engine, 200_003, dtype="float32").astype(float))
    p = cdf(x[::50])
    empirical = (np.arange(x.size)[::50] + 0.5) / x.size
    assert np.abs(p - empirical).max() * math.sqrt(x.size) < 1.95  # Kolmogorov–Smirnov, 0.1 % of all keys
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = {1: 1, 2: 2, 3: 15, 4: 96, 6: 10170}[power]  # the variance of the power of one number
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(spread / x.size)
    assert 4 < np.abs(x).max() < 6.8


def test_neighbours_lanes_and_groups_are_independent() -> None:
    x = drawn("numpy", 1 << 17)
    for lag in (1, 2, noise.LANES, 2 * noise.LANES, 3 * noise.LANES, noise.GROUP):
        for a, b in ((x[:-lag], x[lag:]), (x[:-lag] ** 2, x[lag:] ** 2)):
            assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(a.size)


@pytest.mark.parametrize("size", [1, 3, 255, 257, 1024, 1025, 5000, 3 * 1024])
def test_the_kernel_adds_the_same_noise_as_the_formula(size: int) -> None:
    x, y = np.linspace(-2, 2, size).astype(np.float32), np.linspace(-2, 2, size)
    get_engine("numba").add_noise(x, 0.37, KEY)
    get_engine("numpy").add_noise(y, 0.37, KEY)
    assert np.abs(x - y).max() < 3e-6


def test_the_kernel_is_accurate_over_all_radii_and_angles() -> None:
    x, y = drawn("numba", 1 << 20, dtype="float32"), drawn("numpy", 1 << 20)
    pairs = np.hypot(*y.reshape(-1, 2, noise.LANES).swapaxes(0, 1))  # both numbers of a pair have this radius
    assert pairs.min() < 0.01 and pairs.max() > 5
    assert np.abs(x - y).max() < 6e-6
    assert np.abs(x - y).mean() < 1e-7


def test_a_number_depends_on_its_position_alone() -> None:
    long, before = drawn("numba", 40_000, dtype="float32"), pool.threads()
    try:
        pool.set_threads(1)
        short = drawn("numba", 12_345, dtype="float32")
    finally:
        pool.set_threads(before)
    assert (short == long[:12_345]).all()


def test_the_formula_in_parts_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn("numpy", 10_000)
    monkeypatch.setattr(noise, "PART", 3)
    assert (drawn("numpy", 10_000) == whole).all()


def test_keys_are_independent_in_both_halves() -> None:
    one = drawn("numpy", 50_000)
    for key in (KEY ^ 1, KEY ^ 1 << 32, KEY ^ 1 << 63):
        assert abs(np.corrcoef(one, drawn("numpy", 50_000, key))[0, 1]) < 4 / math.sqrt(50_000)


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_invalid_arguments_are_refused(engine: str) -> None:
    eng = get_engine(engine)
    with pytest.raises(ValueError, match="key must have 64 bits"):
        eng.add_noise(np.zeros(4, np.float32), 1.0, 1 << 64)
    with pytest.raises(ValueError, match="C order"):
        eng.add_noise(np.zeros((4, 6), np.float32)[:, ::2], 1.0, 1)
