"""Rotary position embeddings (RoPE), in steps. Feature i is paired with feature i + D/2."""

from __future__ import annotations

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, even, kept
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


def cases(rng: np.random.Generator, theta: float = 10000.0, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, b: int, h: int, n: int, half: int, start: int = 0, exact: bool = False) -> Case | None:
        shape = even(sizes).fit(name, exact, batch=b, heads=h, tokens=n, head_dim=2 * half)
        if shape is None:
            return None
        b, h, n, d = shape
        inputs = (rng.standard_normal(shape), start + np.arange(n), rng.standard_normal(shape))
        return Case(name, inputs, {"D": d, "n": n, "B": b, "H": h})

    b, h, n, half = distinct(rng, 4, 2, 8)
    found = [
        case("odd sizes", b, h, n + 2, half),
        case("other sizes", h, b, half + 5, n),
        case("one token at position 0", b, h, 1, half, exact=True),
        case("positions that start later", 2, h, n, half, start=40),
        case("a single pair of features", 2, h, n, 1, exact=True),
    ]
    return kept(found)


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
    sizes=("batch", "heads", "tokens", "head_dim"),
)
