"""ReLU and SiLU, in steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.check.layers import swiglu
from onfoot.ops import relu_backward, relu_forward, swiglu_backward, swiglu_forward

AT_ZERO = "ReLU has no derivative at 0; as in PyTorch, its gradient there is 0"

RELU_PIECES = Pieces(
    relu_slope=lambda x: (x > 0) * 1.0,
    relu_dx=lambda dy, slope, x: dy * slope,
)


def relu_steps(p: Pieces, x: Array, dout: Array) -> Gradients:
    return (p.relu_dx(dout, p.relu_slope(x), x),)


def relu_reference(x: Array, dout: Array) -> Gradients:
    return (relu_backward(dout, relu_forward(x)[1]),)


SILU_PIECES = Pieces(
    sigmoid=swiglu.PIECES.sigmoid,
    silu=swiglu.PIECES.silu,
    silu_slope=swiglu.PIECES.silu_slope,
    silu_dx=lambda dy, slope, silu: dy * slope,
)


def silu_steps(p: Pieces, x: Array, dout: Array) -> Gradients:
    s = p.sigmoid(x)
    return (p.silu_dx(dout, p.silu_slope(x, s), p.silu(x, s)),)


def silu_reference(x: Array, dout: Array) -> Gradients:
    return (swiglu_backward(dout, swiglu_forward(x, np.ones_like(x))[1])[0],)


def _case(
    rng: np.random.Generator, sizes: Sizes, name: str, drawn: Sequence[int], spread: float = 1.0, exact: bool = False
) -> Case | None:
    shape = sizes.fit(name, exact, batch=drawn[0], tokens=drawn[1], width=drawn[2])
    if shape is None:
        return None
    x, dout = spread * rng.standard_normal(shape), rng.standard_normal(shape)
    return Case(name, (x, dout), {"d": shape[2], "n": shape[1], "B": shape[0]})


def silu_cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    found = [
        _case(rng, sizes, "odd sizes", distinct(rng, 3)),
        _case(rng, sizes, "a wide range", distinct(rng, 3), 4.0),
        _case(rng, sizes, "far from 0", distinct(rng, 3), 40.0),
        _case(rng, sizes, "one number", (1, 1, 1), exact=True),
    ]
    return kept(found)


def relu_cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    found = kept(
        [
            _case(rng, sizes, "odd sizes", distinct(rng, 3)),
            _case(rng, sizes, "other sizes", distinct(rng, 3, 3, 11)),
            _case(rng, sizes, "close to 0", distinct(rng, 3), 1e-6),
            _case(rng, sizes, "one number", (1, 1, 1), exact=True),
        ]
    )
    zeros = _case(rng, sizes, "zeros", distinct(rng, 3))
    if zeros is not None:
        x, dout = zeros.inputs
        x.reshape(-1)[::2] = 0
        found.append(Case("zeros", (x, dout), zeros.sizes, AT_ZERO))
    return found


RELU = Layer(
    name="relu",
    arguments=("x", "dout"),
    gradients=("dx",),
    contract=("out = max(x, 0)", "x, dout (batch, tokens, features)"),
    cases=relu_cases,
    reference=relu_reference,
    steps=relu_steps,
    pieces=RELU_PIECES,
    sizes=("batch", "tokens", "width"),
)

SILU = Layer(
    name="silu",
    arguments=("x", "dout"),
    gradients=("dx",),
    contract=("out = x/(1 + e⁻ˣ)", "x, dout (batch, tokens, features)"),
    cases=silu_cases,
    reference=silu_reference,
    steps=silu_steps,
    pieces=SILU_PIECES,
    sizes=("batch", "tokens", "width"),
    parts=("swiglu",),
)
