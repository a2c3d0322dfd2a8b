"""ReLU, in steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.learn.layers.own import mistake
from onfoot.ops import relu_backward, relu_forward

PIECES = Pieces(
    relu_slope=lambda x: np.where(x > 0, 1.0, 0.0),
    relu_dx=lambda dy, slope, x: dy * slope,
)


def steps(p: Pieces, x: Array, dout: Array) -> Gradients:
    return (p.relu_dx(dout, p.relu_slope(x), x),)


def reference(x: Array, dout: Array) -> Gradients:
    return (relu_backward(dout, relu_forward(x)[1]),)


def cases(rng: np.random.Generator, sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, drawn: Sequence[int], spread: float = 1.0, exact: bool = False) -> Case | None:
        shape = sizes.fit(name, exact, batch=drawn[0], tokens=drawn[1], width=drawn[2])
        if shape is None:
            return None
        x, dout = spread * rng.standard_normal(shape), rng.standard_normal(shape)
        return Case(name, (x, dout), {"d": shape[2], "n": shape[1], "B": shape[0]})

    found = [
        case("odd sizes", distinct(rng, 3)),
        case("other sizes", distinct(rng, 3, 3, 11)),
        case("a wide range", distinct(rng, 3), 30.0),
        case("one number", (1, 1, 1), exact=True),
    ]
    return kept(found)


MISTAKES = (
    mistake(
        "learn_relu",
        "",
        "ReLU applied to the gradient",
        "dout is cut off where dout is negative; what counts is where x is negative.",
        "choose by the sign of x, not by that of dout",
        relu_dx=lambda dy, slope, x: np.maximum(dy, 0),
    ),
    mistake(
        "learn_relu",
        "",
        "the output in place of the slope",
        "dout is multiplied by max(x, 0), the value of ReLU, where its derivative belongs.",
        "multiply by the derivative, which is 1 or 0",
        relu_dx=lambda dy, slope, x: dy * np.maximum(x, 0),
    ),
    mistake(
        "learn_relu",
        "",
        "the gradient passes where x is negative",
        "The gradient is kept where x is negative and dropped where it is positive.",
        "keep dout where x > 0",
        relu_slope=lambda x: np.where(x > 0, 0.0, 1.0),
    ),
    mistake(
        "learn_relu",
        "",
        "dx is dout unchanged",
        "The gradient passes everywhere, as if the layer were y = x.",
        "drop dout where x is negative",
        relu_slope=lambda x: np.ones_like(x),
    ),
)

RELU = Layer(
    name="learn_relu",
    arguments=("x", "dout"),
    gradients=("dx",),
    contract=("out = max(x, 0)", "x, dout (batch, tokens, features)"),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    sizes=("batch", "tokens", "width"),
    mistakes=MISTAKES,
)
