"""RoPE: pairs of features of queries and keys are rotated by an angle proportional to their position.

The dot product of a query and a key then depends only on their distance. RoPE has no parameters; the backward pass
rotates the gradient back.

Two layouts are in use: feature i is paired with feature i + D/2 (`interleaved=False`, Hugging Face's), or features 2i
and 2i + 1 are a pair (`interleaved=True`, that of the RoPE paper and of GGUF files).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np

from onfoot.arrays import Array, namespace


class Scaling(Protocol):
    """The fields of a RoPE scaling that `frequencies` reads; the names are Hugging Face's."""

    @property
    def rope_type(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...


class RoPESaved(NamedTuple):
    cos: Array
    sin: Array
    interleaved: bool


def frequencies(theta: float, width: int, scaling: Scaling | None = None, length: int = 0) -> np.ndarray:
    """The angle per position of each pair of features, (D/2,), in float64.

    Dynamic (NTK) scaling depends on the length of the longest sequence; up to the original length there is none.
    """
    if width % 2:
        raise ValueError(f"width must be even (RoPE rotates pairs of features), got {width}")
    if scaling is not None and scaling.rope_type == "dynamic":
        ratio = max(1.0, length / scaling.original_max_position_embeddings)
        theta = theta * (scaling.factor * ratio - (scaling.factor - 1)) ** (width / (width - 2))  # eq ROPE.8
    speed = theta ** (-np.arange(0, width, 2) / width)  # eq ROPE.1
    if scaling is None or scaling.rope_type == "dynamic":
        return speed
    if scaling.rope_type == "linear":
        return speed / scaling.factor  # eq ROPE.2
    if scaling.rope_type != "llama3":
        raise ValueError(f"rope scaling {scaling.rope_type!r} is not supported; choose from linear, llama3, dynamic")
    turns = scaling.original_max_position_embeddings * speed / (2 * math.pi)  # within the original context length
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)  # 1: unchanged; 0: divided by the full factor
    return share * speed + (1 - share) * speed / scaling.factor  # eq ROPE.3


def angles(positions: np.ndarray, speed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position × frequency, (..., D/2), in float64: a float32 angle at position 8000 is off by 5e-4."""
    angle = np.asarray(positions, dtype=np.float64)[..., None] * speed
    return np.cos(angle), np.sin(angle)


def rope_forward(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> tuple[Array, RoPESaved]:
    """x (..., T, D) with each pair (a, b) of features rotated to (a cos − b sin, a sin + b cos)."""
    return turn(x, cos, sin, interleaved), RoPESaved(cos, sin, interleaved)  # eq ROPE.4


def rope_backward(dy: Array, saved: RoPESaved) -> Array:
    """The gradient of x: dy rotated back by the negative angle. cos and sin are not trained."""
    return turn(dy, saved.cos, -saved.sin, saved.interleaved)  # eq ROPE.5


def turn(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    half = x.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    a, b = x[..., first], x[..., second]  # (..., T, D/2)
    y = namespace(x).empty_like(x)
    y[..., first] = a * cos - b * sin
    y[..., second] = a * sin + b * cos
    return y
