"""Known mistakes in the derivative of GELU."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.check.layers.gelu import cumulative, density
from onfoot.ops import gelu_erf_backward, gelu_tanh_forward
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI


def gelu_mixed_backward(dy: Array, x: Array) -> Array:
    """The tanh form in the forward pass, the derivative of the erf form in the backward pass."""
    return gelu_erf_backward(dy, gelu_tanh_forward(x)[1])


MISTAKES = (
    Mistake(
        "tanh-GELU with erf's derivative",
        "gelu",
        "Φ(x) + x φ(x) is the derivative of the erf form; the two forms differ by about 1e-3.",
        "G.4",
        "use the derivative of the tanh form; or check with form='erf' if the forward pass uses erf",
        lambda p: _form("erf"),
        "E32",
        needs={"form": "tanh"},
    ),
    Mistake(
        "erf-GELU with tanh's derivative",
        "gelu",
        "The derivative belongs to the tanh form; the two forms differ by about 1e-3.",
        "G.6",
        "use the derivative of the erf form; or check with form='tanh' if the forward pass uses tanh",
        lambda p: _form("tanh"),
        needs={"form": "erf"},
    ),
    Mistake(
        "x φ(x) missing",
        "gelu",
        "The derivative is Φ(x) alone, but the product x Φ(x) gives two terms.",
        "G.4",
        "add x times the derivative of Φ",
        lambda p: {"slope": lambda x, cumulative, density: cumulative},
    ),
    Mistake(
        "the inner derivative of tanh missing",
        "gelu",
        "x/2 (1 − tanh² u) lacks its factor u' = √(2/π)(1 + 3 · 0.044715 x²).",
        "G.4",
        "multiply by u'",
        lambda p: {"density": lambda x, form: 0.5 * (1 - _tanh(x) ** 2)},
        needs={"form": "tanh"},
    ),
    Mistake(
        "the factor 3 of the derivative of x³ missing",
        "gelu",
        "u' = √(2/π)(1 + 0.044715 x²): the derivative of x³ is 3 x².",
        "G.4",
        "u' = √(2/π)(1 + 3 · 0.044715 x²)",
        lambda p: {
            "density": lambda x, form: 0.5 * (1 - _tanh(x) ** 2) * ROOT_2_OVER_PI * (1 + CUBIC * x * x),
        },
        needs={"form": "tanh"},
    ),
    Mistake(
        "tanh in place of its square",
        "gelu",
        "The derivative of tanh u is 1 − tanh² u; here it is 1 − tanh u.",
        "G.4",
        "square the tanh",
        lambda p: {
            "density": lambda x, form: 0.5 * (1 - _tanh(x)) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * x * x),
        },
        needs={"form": "tanh"},
    ),
    Mistake(
        "the function in place of its derivative",
        "gelu",
        "dx = dout ∘ gelu(x).",
        "G.4",
        "dx = dout ∘ gelu'(x)",
        lambda p: {"slope": lambda x, cumulative, density: x * cumulative},
    ),
    Mistake(
        "the derivative of the sigmoid form",
        "gelu",
        "The derivative of x σ(1.702 x), a third form of GELU.",
        "G.4",
        "use the derivative of the same form as the forward pass",
        lambda p: {
            "cumulative": lambda x, form: _sigmoid(x),
            "density": lambda x, form: 1.702 * _sigmoid(x) * (1 - _sigmoid(x)),
        },
    ),
)


def _tanh(x: Array) -> Array:
    return np.tanh(ROOT_2_OVER_PI * (x + CUBIC * x**3))


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * 1.702 * x))


def _form(other: str) -> dict[str, Piece]:
    """Φ and φ of the other form."""
    return {"cumulative": lambda x, form: cumulative(x, other), "density": lambda x, form: density(x, other)}
