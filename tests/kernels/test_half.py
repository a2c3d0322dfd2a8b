"""Products with 16-bit weights: the bits of the same products in float32, on any shape and number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onfoot
from onfoot import kernels
from onfoot.quantized import HalfWeight, rounded, widened
from onfoot.recording import pool

pytest.importorskip("numba")
TABLE = kernels.table()
KINDS = ("BF16", "F16")


@pytest.fixture(scope="module", autouse=True)
def same_threads_after() -> Iterator[None]:
    before = pool.threads()
    yield
    onfoot.set_threads(before)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.sampled_from([1, 2, 7, 8, 9, 20, 75]),
    width=st.integers(2, 900),  # blocks of the product are 384 deep
    outputs=st.integers(2, 500),  # and 192 columns are widened at a time
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_have_the_bits_of_float32(
    kind: str, rows: int, width: int, outputs: int, threads: int, seed: int
) -> None:
    onfoot.set_threads(threads)
    rng = np.random.default_rng(seed)
    bits = rounded(rng.standard_normal((outputs, width)), kind)
    half, floats = HalfWeight(kind, bits), widened(bits, kind)
    x, dy, skip = (rng.standard_normal((rows, n)).astype(np.float32) for n in (width, outputs, outputs))
    bias = rng.standard_normal(outputs).astype(np.float32)
    y, saved = TABLE["frozen_linear_skip"](x, half.T, bias, skip)
    right, right_saved = TABLE["frozen_linear_skip"](x, floats.T, bias, skip)
    assert np.array_equal(y, right)
    exact = x.astype(np.float64) @ floats.T.astype(np.float64)
    assert np.abs(y - exact - bias - skip).max() <= 1e-6 * width + 1e-5
    dx, right = TABLE["frozen_linear_backward"](dy, saved), dy.astype(np.float64) @ floats
    assert np.linalg.norm(dx - right) <= 3e-6 * np.linalg.norm(dy) * np.linalg.norm(floats)
    many = slice(None) if rows > 8 else slice(0)  # up to 8 rows, float32 adds them in another order
    assert np.array_equal(dx[many], TABLE["frozen_linear_backward"](dy, right_saved)[many])


@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_number_is_widened_exactly(kind: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).reshape(1 << 8, 1 << 8)
    rows, _ = TABLE["embedding_forward"](np.arange(1 << 8), HalfWeight(kind, every))
    right = every.view(np.float16).astype(np.float32) if kind == "F16" else (every.astype("<u4") << 16).view("<f4")
    assert np.array_equal(rows, right, equal_nan=True)
    assert np.array_equal(np.signbit(rows), np.signbit(right))


def test_rounding_is_pytorchs() -> None:
    import torch

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 100_000, np.uint32)
    bits[:4096] = bits[:4096] >> 16 << 16 | 0x8000  # midway between two
    x = bits.view(np.float32)
    theirs = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(x)
    assert np.array_equal(rounded(x, "BF16")[number], theirs[number])
    assert np.isnan(widened(rounded(x[~number], "BF16"), "BF16")).all()
    assert np.array_equal(rounded(x[np.abs(x) < 60000], "F16"), x[np.abs(x) < 60000].astype(np.float16).view(np.uint16))


def test_wrong_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown 16-bit type 'F8'; choose from BF16, F16"):
        HalfWeight("F8", np.zeros((2, 2), np.uint16))
    with pytest.raises(ValueError, match=r"F16 numbers must have shape \(out, in\) and dtype uint16, got \(3,\)"):
        HalfWeight("F16", np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match="incompatible shapes"):
        TABLE["frozen_linear_forward"](np.ones((2, 5), np.float32), HalfWeight("F16", np.zeros((3, 4), np.uint16)).T)
    assert repr(HalfWeight("F16", np.zeros((3, 4), np.uint16))) == "HalfWeight(F16, (3, 4), 24 bytes)"
