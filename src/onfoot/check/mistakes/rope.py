"""Known mistakes in the backward pass of rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.check.layers.rope import rotate


def rotate_adjacent(x: Array, angle: Array) -> Array:
    """The interleaved layout: features 2i and 2i + 1 form a pair."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angle), np.sin(angle)
    rotated = np.empty_like(x)
    rotated[..., 0::2], rotated[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return rotated


def _mistake(
    name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], equation: str = "ROPE.5"
) -> Mistake:
    return Mistake(name, "rope", explains, equation, fix, apply)


MISTAKES = (
    _mistake(
        "rotated forward again",
        "dout is rotated by the same angle as x; the gradient needs the inverse rotation.",
        "replace sin of the forward pass by −sin",
        lambda p: {"rotate_back": lambda dy, angles: rotate(dy, angles)},
    ),
    _mistake(
        "the rotation left out",
        "dx = dout.",
        "rotate dout back by the angle of its position",
        lambda p: {"rotate_back": lambda dy, angles: 1.0 * dy},
    ),
    _mistake(
        "adjacent features as pairs",
        "Features 2i and 2i + 1 are rotated together; this layer pairs features i and i + D/2.",
        "pair feature i with feature i + D/2; or permute the weights if the interleaved layout is intended",
        lambda p: {"rotate_back": lambda dy, angles: rotate_adjacent(dy, -angles)},
    ),
    _mistake(
        "positions counted from 1",
        "The first token is rotated by one step; its position is 0.",
        "use the given positions unchanged",
        lambda p: {"angles": lambda positions, frequencies: (positions[:, None] + 1) * frequencies},
    ),
    _mistake(
        "positions not used",
        "The angles are those of positions 0, 1, 2, …, whatever the given positions.",
        "use the given positions: with a KV cache they do not start at 0",
        lambda p: {"angles": lambda positions, frequencies: np.arange(len(positions))[:, None] * frequencies},
    ),
    _mistake(
        "θ^(−i/D) in place of θ^(−2i/D)",
        "The frequencies decrease half as fast as they should.",
        "frequency i = theta^(−2i/D), i = 0 … D/2 − 1",
        lambda p: {"frequencies": lambda width, theta: theta ** (-np.arange(width // 2) / width)},
        "ROPE.1",
    ),
    _mistake(
        "the second half with the wrong sign",
        "Each pair is reflected, not rotated: sin has the same sign in both rows.",
        "first · cos + second · sin, second · cos − first · sin",
        lambda p: {"rotate_back": lambda dy, angles: _reflected(dy, angles)},
    ),
)


def _reflected(dy: Array, angle: Array) -> Array:
    first, second = np.split(dy, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)
