"""Slips in activations: the derivative of another one, and slips in that of SiLU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.arrays import erf
from onfoot.check.layer import Array, Layer, Mistake
from onfoot.check.slips.gelu import cumulative, density
from onfoot.check.slips.made import fitted, named
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "slope" in layer.pieces.names():
        yield from _activations(layer)
    if "silu_slope" in layer.pieces.names():
        yield from _gates(layer)
    if "relu_slope" in layer.pieces.names():
        yield fitted(
            layer,
            "the derivative of a leaky ReLU",
            "slope below 0",
            (0.01, 0.1, 0.2),
            "the derivative of max(x, 0) is 0 below 0",
            lambda p, slope: {"relu_slope": lambda x: np.where(x > 0, 1.0, slope)},
        )


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _normal(x: Array) -> Array:
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def _normal_density(x: Array) -> Array:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


# activation: its derivative; and the function itself, for a gate
SLOPES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "ReLU": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "SiLU": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "the sigmoid": (_sigmoid, lambda x: _sigmoid(x) * (1 - _sigmoid(x))),
    "GELU (erf)": (lambda x: x * _normal(x), lambda x: _normal(x) + x * _normal_density(x)),
    "GELU (tanh)": (
        lambda x: x * cumulative(ROOT_2_OVER_PI, CUBIC)(x, ""),
        lambda x: cumulative(ROOT_2_OVER_PI, CUBIC)(x, "") + x * density(ROOT_2_OVER_PI, CUBIC)(x, ""),
    ),
    "the identity": (lambda x: x, lambda x: 0 * x + 1.0),
}


def _activations(layer: Layer) -> Iterator[Mistake]:
    for name, (_, slope) in SLOPES.items():
        if "GELU" not in name:
            yield named(
                layer,
                f"the derivative of {name} in place of GELU's",
                "dx = dout ∘ gelu'(x)",
                lambda p, case, slope=slope: {"slope": lambda x, cumulative, density: slope(x)},
                "slope",
            )
    yield fitted(
        layer,
        "the derivative of x σ(c x)",
        "c",
        (1.702, 1.0, 1.6),
        "use the derivative of the same form as the forward pass",
        lambda p, c: {
            "cumulative": lambda x, form: _sigmoid(c * x),
            "density": lambda x, form: c * _sigmoid(c * x) * (1 - _sigmoid(c * x)),
        },
    )


def _gates(layer: Layer) -> Iterator[Mistake]:
    fix = "silu(x) = x σ(x) with σ(x) = 1/(1 + e⁻ˣ)"
    for name, (value, slope) in SLOPES.items():
        if name != "SiLU":
            yield named(
                layer,
                f"{name} in place of SiLU",
                fix,
                lambda p, case, value=value, slope=slope: {
                    "silu": lambda gate, s: value(gate),
                    "silu_slope": lambda gate, s: slope(gate),
                },
                "silu",
                "silu_slope",
            )
    slips: dict[str, Callable[[Array, Array], Array]] = {
        "σ (1 + x)(1 − σ)": lambda x, s: s * (1 + x) * (1 - s),
        "σ (1 + x σ (1 − σ))": lambda x, s: s * (1 + x * s * (1 - s)),
        "σ + x (1 − σ)": lambda x, s: s + x * (1 - s),
        "σ + (1 − σ)": lambda x, s: s + (1 - s),
        "σ + x σ (1 − x)": lambda x, s: s + x * s * (1 - x),
        "σ (1 + x − σ)": lambda x, s: s * (1 + x - s),
        "σ + σ (1 − σ)": lambda x, s: s + s * (1 - s),
        "σ − x σ (1 − σ)": lambda x, s: s - x * s * (1 - s),
    }
    for name, slip in slips.items():
        yield named(
            layer,
            f"silu' as {name}",
            "silu'(x) = σ(x) (1 + x (1 − σ(x)))",
            lambda p, case, slip=slip: {"silu_slope": slip},
            "silu_slope",
        )
    for where, inner in (("", True), (", without the inner derivative", False)):
        yield fitted(
            layer,
            f"σ(c x) in place of σ(x){where}",
            "c",
            (1.702, 0.5, 2.0, -1.0),
            fix,
            lambda p, c, inner=inner: {
                "sigmoid": lambda gate: _sigmoid(c * gate),
                "silu_slope": lambda gate, s: s + (c if inner else 1.0) * gate * s * (1 - s),
            },
        )
