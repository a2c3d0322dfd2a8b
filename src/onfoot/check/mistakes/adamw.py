"""What goes wrong in AdamW."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Mistake, Piece


def _mistake(name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]]) -> Mistake:
    return Mistake(name, "adamw", explains, equation, fix, apply)


MISTAKES = (
    _mistake(
        "1 − β₁ in the second moment",
        "v = β₂ v + (1 − β₁) g²: the weights of the running mean do not sum to 1.",
        "ADAM.3",
        "v = β₂ v + (1 − β₂) g²",
        lambda p: {"second": lambda v, g, beta1, beta2: beta2 * v + (1 - beta1) * (g * g)},
    ),
    _mistake(
        "no correction of the means",
        "m and v start at 0, and are used as they are: the first steps have the wrong size.",
        "ADAM.4",
        "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)",
        lambda p: {
            "first_corrected": lambda m, beta1, beta2, t: m,
            "second_corrected": lambda v, beta1, beta2, t: v,
        },
    ),
    _mistake(
        "β₁ in the correction of the second moment",
        "v̂ = v/(1 − β₁ᵗ).",
        "ADAM.4",
        "v̂ = v/(1 − β₂ᵗ)",
        lambda p: {"second_corrected": lambda v, beta1, beta2, t: v / (1 - beta1**t)},
    ),
    _mistake(
        "steps counted from 0",
        "The means are corrected with β^(t + 1), one step too far.",
        "ADAM.4",
        "the first step has t = 1",
        lambda p: {
            "first_corrected": lambda m, beta1, beta2, t: m / (1 - beta1 ** (t + 1)),
            "second_corrected": lambda v, beta1, beta2, t: v / (1 - beta2 ** (t + 1)),
        },
    ),
    _mistake(
        "eps under the root",
        "√(v̂ + eps): with small gradients the step is far too small.",
        "ADAM.5",
        "√v̂ + eps",
        lambda p: {"spread": lambda v, eps: np.sqrt(v + eps)},
    ),
    _mistake(
        "the root missing",
        "m̂ is divided by v̂, not by its root.",
        "ADAM.5",
        "√v̂ + eps",
        lambda p: {"spread": lambda v, eps: v + eps},
    ),
    _mistake(
        "decay through the gradient",
        "weight_decay · param is added to the gradient (Adam with L2); AdamW takes it off the weight itself.",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay), and the gradient as it is",
        lambda p: {
            "seen_gradient": lambda grad, param, decay: grad + decay * param,
            "decayed": lambda param, lr, decay: param,
        },
    ),
    _mistake(
        "no decay",
        "The weight is not decayed.",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay)",
        lambda p: {"decayed": lambda param, lr, decay: param},
    ),
    _mistake(
        "decay after the step",
        "The weight that has moved is decayed: the step shrinks as well.",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay) first, then the step",
        lambda p: {
            "decayed": lambda param, lr, decay: param,
            "moved": lambda param, lr, m, spread, decay: (param - lr * m / spread) * (1 - lr * decay),
        },
    ),
    _mistake(
        "decay without the learning rate",
        "param ← param (1 − weight_decay).",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay)",
        lambda p: {"decayed": lambda param, lr, decay: param * (1 - decay)},
    ),
)
