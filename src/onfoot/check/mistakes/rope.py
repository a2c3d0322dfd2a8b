"""What goes wrong in the backward pass of rotary positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.check.layers.rope import turn


def turn_neighbours(x: Array, angle: Array) -> Array:
    """The other layout: features 2i and 2i + 1 form a pair."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angle), np.sin(angle)
    turned = np.empty_like(x)
    turned[..., 0::2], turned[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return turned


def _mistake(
    name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], equation: str = "ROPE.5"
) -> Mistake:
    return Mistake(name, "rope", explains, equation, fix, apply)


MISTAKES = (
    _mistake(
        "turned forward once more",
        "dout is turned by the same angle as x; the gradient goes back by the inverse rotation.",
        "use −sin where the forward pass has sin",
        lambda p: {"turn_back": lambda dy, angles: turn(dy, angles)},
    ),
    _mistake(
        "the rotation left out",
        "dx = dout.",
        "turn dout back by the angle of its position",
        lambda p: {"turn_back": lambda dy, angles: 1.0 * dy},
    ),
    _mistake(
        "neighbours as pairs",
        "Features 2i and 2i + 1 are turned together; here features i and i + D/2 are a pair.",
        "pair feature i with feature i + D/2; or permute the weights if the other layout is meant",
        lambda p: {"turn_back": lambda dy, angles: turn_neighbours(dy, -angles)},
    ),
    _mistake(
        "positions counted from 1",
        "The first token is turned by one step; its position is 0.",
        "use the positions as they are given",
        lambda p: {"angles": lambda positions, frequencies: (positions[:, None] + 1) * frequencies},
    ),
    _mistake(
        "positions not used",
        "The angles are those of tokens 0, 1, 2, …, whatever their positions.",
        "use the positions that are given: behind a cache they start later",
        lambda p: {"angles": lambda positions, frequencies: np.arange(len(positions))[:, None] * frequencies},
    ),
    _mistake(
        "θ^(−i/D) in place of θ^(−2i/D)",
        "The frequencies fall half as fast as they should.",
        "frequency i = theta^(−2i/D), i = 0 … D/2 − 1",
        lambda p: {"frequencies": lambda width, theta: theta ** (-np.arange(width // 2) / width)},
        "ROPE.1",
    ),
    _mistake(
        "the second half with the wrong sign",
        "Each pair is mirrored, not turned: the sign of sin is the same in both rows.",
        "first · cos + second · sin, second · cos − first · sin",
        lambda p: {"turn_back": lambda dy, angles: _mirrored(dy, angles)},
    ),
)


def _mirrored(dy: Array, angle: Array) -> Array:
    first, second = np.split(dy, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos + second * sin, second * cos + first * sin], axis=-1)
