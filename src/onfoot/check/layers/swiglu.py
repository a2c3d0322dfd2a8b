"""SwiGLU, in steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import swiglu_backward, swiglu_forward
from onfoot.ops.swiglu import sigmoid

PIECES = Pieces(
    sigmoid=sigmoid,
    silu=lambda gate, s: gate * s,
    silu_slope=lambda gate, s: s + gate * s * (1 - s),
    dgate=lambda dy, up, slope, silu: dy * up * slope,
    dup=lambda dy, silu, gate, s: dy * silu,
)


def steps(p: Pieces, gate: Array, up: Array, dout: Array) -> Gradients:
    s = p.sigmoid(gate)
    silu = p.silu(gate, s)
    return p.dgate(dout, up, p.silu_slope(gate, s), silu), p.dup(dout, silu, gate, s)


def reference(gate: Array, up: Array, dout: Array) -> Gradients:
    return swiglu_backward(dout, swiglu_forward(gate, up)[1])


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, drawn: Sequence[int], spread: float = 1.0, exact: bool = False) -> Case | None:
        shape = sizes.fit(name, exact, batch=drawn[0], tokens=drawn[1], width=drawn[2])
        if shape is None:
            return None
        gate, up, dout = (rng.standard_normal(shape) for _ in range(3))
        return Case(name, (spread * gate, up, dout), {"d": shape[2], "n": shape[1], "B": shape[0]})

    found = [
        case("odd sizes", distinct(rng, 3)),
        case("a wide range", distinct(rng, 3), 4.0),
        case("far from 0", distinct(rng, 3), 40.0),
        case("one number", (1, 1, 1), exact=True),
    ]
    return kept(found)


SWIGLU = Layer(
    name="swiglu",
    arguments=("gate", "up", "dout"),
    gradients=("dgate", "dup"),
    contract=("out = silu(gate) ∘ up with silu(x) = x/(1 + e⁻ˣ)", "gate, up, dout (batch, tokens, features)"),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width"),
)
