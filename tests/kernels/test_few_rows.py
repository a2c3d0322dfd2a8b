"""A row of a product of a few rows has the same bits alone and among others, whatever its depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onfoot.quantized import HalfWeight, rounded

pytest.importorskip("numba")

from onfoot.kernels.linear import affine


def weights(rng: np.random.Generator, kind: str, depth: int) -> Any:
    """A weight (depth, 7) stored (out, in)."""
    numbers = rng.standard_normal((7, depth)).astype(np.float32)
    return numbers.T if kind == "F32" else HalfWeight(kind, rounded(numbers, kind)).T


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("depth", [1, 31, 33, 48, 54, 96])
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str, depth: int, threads: int) -> None:
    rng = np.random.default_rng(depth)
    weight = weights(rng, kind, depth)
    for n in (2, 3, 5, 8, 16):
        x = rng.standard_normal((n, depth)).astype(np.float32)
        together = np.array(affine(x, weight, None))
        for i in range(n):
            np.testing.assert_array_equal(together[i], np.array(affine(x[i : i + 1], weight, None))[0])
