"""GELU in both its forms, in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onfoot.arrays import erf
from onfoot.check.case_sizes import ANY, Sizes, kept
from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, distinct
from onfoot.ops import gelu_erf_backward, gelu_erf_forward, gelu_tanh_backward, gelu_tanh_forward
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI

FORMS = {"tanh": (gelu_tanh_forward, gelu_tanh_backward), "erf": (gelu_erf_forward, gelu_erf_backward)}


def cumulative(x: Array, form: str) -> Array:
    """Φ(x), or the tanh form's approximation of it."""
    if form == "erf":
        return 0.5 * (1 + erf(x / math.sqrt(2)))
    return 0.5 * (1 + np.tanh(ROOT_2_OVER_PI * (x + CUBIC * x**3)))


def density(x: Array, form: str) -> Array:
    """φ(x), or the derivative of that approximation."""
    if form == "erf":
        return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    tanh = np.tanh(ROOT_2_OVER_PI * (x + CUBIC * x**3))
    return 0.5 * (1 - tanh * tanh) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * x * x)


PIECES = Pieces(
    cumulative=cumulative,
    density=density,
    slope=lambda x, cumulative, density: cumulative + x * density,
    gelu_dx=lambda dy, slope: dy * slope,
)


def steps(p: Pieces, x: Array, dout: Array, form: str = "tanh") -> Gradients:
    return (p.gelu_dx(dout, p.slope(x, p.cumulative(x, form), p.density(x, form))),)


def reference(x: Array, dout: Array, form: str = "tanh") -> Gradients:
    forward, backward = FORMS[form]
    return (backward(dout, forward(x)[1]),)


def cases(rng: np.random.Generator, form: str = "tanh", sizes: Sizes = ANY) -> list[Case]:
    def case(name: str, shape: Sequence[int], spread: float, exact: bool = False) -> Case | None:
        b, n, d = shape
        fitted = sizes.fit(name, exact, batch=b, tokens=n, width=d)
        if fitted is None:
            return None
        b, n, d = shape = fitted
        inputs = (spread * rng.standard_normal(shape), rng.standard_normal(shape))
        return Case(name, inputs, {"d": d, "n": n, "B": b})

    shapes = [distinct(rng, 3) for _ in range(4)]
    found = [
        case("odd sizes", shapes[0], 1.0),
        case("a wide range", shapes[1], 3.0),
        case("close to 0", shapes[2], 1e-3),
        case("far from 0", shapes[3], 30.0),
        case("one number", (1, 1, 1), 1.0, exact=True),
    ]
    return kept(found)


GELU = Layer(
    name="gelu",
    arguments=("x", "dout"),
    gradients=("dx",),
    contract=(
        "out = x/2 (1 + tanh(√(2/π)(x + 0.044715 x³))); form='erf': out = x Φ(x)",
        "x, dout (batch, tokens, features)",
    ),
    cases=cases,
    reference=reference,
    steps=steps,
    pieces=PIECES,
    options={"form": "tanh"},
    sizes=("batch", "tokens", "width"),
    choices={"form": tuple(FORMS)},
)
