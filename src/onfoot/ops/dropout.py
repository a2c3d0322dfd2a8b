"""Dropout: features set to 0 at random, the rest scaled up so that the mean stays the same.

The pattern is drawn outside the pair, from a seed only: it is the same on every engine, and can be drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onfoot.arrays import Array, Shape


class DropoutSaved(NamedTuple):
    keep: Array


def dropout_pattern(shape: Shape, p: float, seed: int | Sequence[int], dtype: str = "float32") -> np.ndarray:
    """0 with probability p, 1/(1 − p) otherwise."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout probability must be in [0, 1), got {p}")
    kept = np.random.default_rng(seed).random(shape, dtype=np.float32) >= p
    return kept.astype(dtype) / np.asarray(1 - p, dtype=dtype)


def dropout_forward(x: Array, keep: Array) -> tuple[Array, DropoutSaved]:
    """y = x ∘ keep."""
    return x * keep, DropoutSaved(keep)  # eq DO.1


def dropout_backward(dy: Array, saved: DropoutSaved) -> Array:
    """dx = dy ∘ keep: dropped features get no gradient."""
    return dy * saved.keep  # eq DO.2
