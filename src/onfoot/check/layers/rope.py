"""Rotary position embeddings (RoPE), in steps. Feature i is paired with feature i + D/2."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import rope_backward, rope_forward
from onfoot.ops.rope import angles, frequencies


def rotate(x: Array, angle: Array) -> Array:
    """Rotates each pair (x_i, x_{i + D/2}) by its angle, (T, D/2)."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


PIECES = Pieces(
    frequencies=lambda width, theta: theta ** (-np.arange(0, width, 2) / width),
    angles=lambda positions, frequencies: positions[:, None] * frequencies,
    rotate_back=lambda dy, angles: rotate(dy, -angles),
)


def steps(p: Pieces, x: Array, positions: Array, dout: Array, theta: float = 10000.0) -> Gradients:
    return (p.rotate_back(dout, p.angles(positions, p.frequencies(x.shape[-1], theta))),)


def reference(x: Array, positions: Array, dout: Array, theta: float = 10000.0) -> Gradients:
    cos, sin = angles(positions, frequencies(theta, x.shape[-1]))
    return (rope_backward(dout, rope_forward(x, cos, sin)[1]),)


def cases(rng: np.random.Generator, theta: float = 10000.0) -> list[Case]:
    def case(name: str, b: int, h: int, positions: Array, half: int) -> Case:
        shape = (b, h, len(positions), 2 * half)
        inputs = (rng.standard_normal(shape), positions, rng.standard_normal(shape))
        return Case(name, inputs, {"D": 2 * half, "n": len(positions), "B": b, "H": h})

    b, h, n, half = distinct(rng, 4, 2, 8)
    return [
        case("odd sizes", b, h, np.arange(n + 2), half),
        case("other sizes", h, b, np.arange(half + 5), n),
        case("one token at position 0", b, h, np.arange(1), half),
        case("positions that start later", 2, h, np.arange(n) + 40, half),
        case("a single pair of features", 2, h, np.arange(n), 1),
    ]


ROPE = Layer(
    name="rope",
    arguments=("x", "positions", "dout"),
    gradients=("dx",),
    contract=(
        "out: features i and i + D/2 of a token rotated by position · theta^(−2i/D); theta = 10000",
        "x, dout (batch, heads, tokens, D); positions (tokens), integers from 0",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"theta": 10000.0},
)
