"""Softmax over the last axis, in steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import attention
from onfoot.ops.attention import softmax, softmax_backward

PIECES = Pieces(
    weights=attention.PIECES.weights,
    row_dots=attention.PIECES.row_dots,
    dscores=attention.PIECES.dscores,
)


def steps(p: Pieces, x: Array, dout: Array) -> Gradients:
    y = p.weights(x, None)  # (B, T, C)
    return (p.dscores(dout, y, p.row_dots(dout, y), x, None),)


def reference(x: Array, dout: Array) -> Gradients:
    return (softmax_backward(dout, softmax(x)),)


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(
        name: str, drawn: Sequence[int], spread: float = 1.0, exact: bool = False, offset: float = 0.0, beyond: str = ""
    ) -> Case | None:
        shape = sizes.fit(name, exact, batch=drawn[0], tokens=drawn[1], width=drawn[2])
        if shape is None:
            return None
        x, dout = rng.standard_normal(shape), rng.standard_normal(shape)
        return Case(name, (spread * x + offset, dout), {"d": shape[2], "n": shape[1], "B": shape[0]}, beyond)

    square = int(rng.integers(4, 8))
    found = [
        case("odd sizes", distinct(rng, 3)),
        case("other sizes", distinct(rng, 3, 3, 11)),
        case("as many rows as entries", (2, square, square), exact=True),
        case("one entry per row", (2, 3, 1), exact=True),
        case("large inputs", distinct(rng, 3), spread=20.0, offset=900.0, beyond=attention.OVERFLOW),
    ]
    return kept(found)


SOFTMAX = Layer(
    name="softmax",
    arguments=("x", "dout"),
    gradients=("dx",),
    contract=("out = exp(x)/Σ exp(x), over the last axis", "x, dout (batch, tokens, features)"),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width"),
    assumes={"causal": False},
    parts=("attention",),
)
