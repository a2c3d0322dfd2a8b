"""Known mistakes in ReLU, SiLU and softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Mistake, Piece

Apply = Callable[..., dict[str, Piece]]


def _relu(name: str, explains: str, fix: str, apply: Apply) -> Mistake:
    return Mistake(name, "relu", explains, "G.2", fix, apply)


WHERE = "dx = dout where x > 0, else 0"

RELU = (
    _relu(
        "the upstream gradient masked by its own sign",
        "dx = max(dout, 0): the mask is that of x, not of dout.",
        WHERE,
        lambda p: {"relu_dx": lambda dy, slope, x: np.maximum(dy, 0)},
    ),
    _relu(
        "the mask missing",
        "dx = dout: also where x is negative.",
        WHERE,
        lambda p: {"relu_slope": lambda x: 0 * x + 1.0},
    ),
    _relu(
        "the mask reversed",
        "dx = dout where x < 0.",
        WHERE,
        lambda p: {"relu_slope": lambda x: (x < 0) * 1.0},
    ),
    _relu(
        "the function in place of its derivative",
        "dx = dout ∘ max(x, 0): the slope is 1, not x.",
        WHERE,
        lambda p: {"relu_slope": lambda x: np.maximum(x, 0)},
    ),
    _relu(
        "the slope without dout",
        "dx = 1 where x > 0: the upstream gradient is not multiplied in.",
        WHERE,
        lambda p: {"relu_dx": lambda dy, slope, x: 0 * dy + slope},
    ),
    _relu(
        "a gradient at 0",
        "x ≥ 0 in place of x > 0: an input of exactly 0 gets the gradient; PyTorch and most others give it 0.",
        WHERE,
        lambda p: {"relu_slope": lambda x: (x >= 0) * 1.0},
    ),
)

SILU = (
    Mistake(
        "the function in place of its derivative",
        "silu",
        "dx = dout ∘ silu(x).",
        "GLU.2",
        "silu'(x) = σ(x) + x σ(x)(1 − σ(x))",
        lambda p: {"silu_dx": lambda dy, slope, silu: dy * silu},
    ),
)

SOFTMAX = (
    Mistake(
        "the gradient of log-softmax",
        "softmax",
        "dout − y Σ dout is the gradient of log softmax(x).",
        "25",
        "dx = (dout − Σ dout ∘ y) ∘ y",
        lambda p: {
            "row_dots": lambda drho, rho: drho.sum(axis=-1, keepdims=True),
            "dscores": lambda drho, rho, dots, scores, mask: drho - rho * dots,
        },
    ),
)

MISTAKES = (*RELU, *SILU, *SOFTMAX)
