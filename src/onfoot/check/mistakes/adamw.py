"""Known mistakes in AdamW."""

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
        "no bias correction",
        "m and v start at 0 and are used uncorrected: the first steps have the wrong size.",
        "ADAM.4",
        "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)",
        lambda p: {
            "first_corrected": lambda m, beta1, beta2, t: m,
            "second_corrected": lambda v, beta1, beta2, t: v,
        },
    ),
    _mistake(
        "β₁ in the bias correction of the second moment",
        "v̂ = v/(1 − β₁ᵗ).",
        "ADAM.4",
        "v̂ = v/(1 − β₂ᵗ)",
        lambda p: {"second_corrected": lambda v, beta1, beta2, t: v / (1 - beta1**t)},
    ),
    _mistake(
        "steps counted from 0",
        "The bias correction uses β^(t + 1), one step too far.",
        "ADAM.4",
        "the first step has t = 1",
        lambda p: {
            "first_corrected": lambda m, beta1, beta2, t: m / (1 - beta1 ** (t + 1)),
            "second_corrected": lambda v, beta1, beta2, t: v / (1 - beta2 ** (t + 1)),
        },
    ),
    _mistake(
        "eps inside the square root",
        "√(v̂ + eps): with small gradients the step is far too small.",
        "ADAM.5",
        "√v̂ + eps",
        lambda p: {"denominator": lambda v, eps: np.sqrt(v + eps)},
    ),
    _mistake(
        "the step is added in place of subtracted",
        "param + lr m̂/(√v̂ + eps): the loss grows along the gradient, so that the weight must go against it.",
        "ADAM.5",
        "param − lr m̂/(√v̂ + eps)",
        lambda p: {"updated": lambda param, lr, m, denominator, decay: param + lr * m / denominator},
    ),
    _mistake(
        "the square root missing",
        "m̂ is divided by v̂, not by its square root.",
        "ADAM.5",
        "√v̂ + eps",
        lambda p: {"denominator": lambda v, eps: v + eps},
    ),
    _mistake(
        "weight decay added to the gradient",
        "weight_decay · param is added to the gradient (Adam with L2); AdamW subtracts it from the weight itself.",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay), with the gradient unchanged",
        lambda p: {
            "effective_gradient": lambda grad, param, decay: grad + decay * param,
            "decayed": lambda param, lr, decay: param,
        },
    ),
    _mistake(
        "no weight decay",
        "The weight is not decayed.",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay)",
        lambda p: {"decayed": lambda param, lr, decay: param},
    ),
    _mistake(
        "weight decay after the step",
        "The updated weight is decayed, which shrinks the step as well.",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay) first, then the step",
        lambda p: {
            "decayed": lambda param, lr, decay: param,
            "updated": lambda param, lr, m, denominator, decay: (param - lr * m / denominator) * (1 - lr * decay),
        },
    ),
    _mistake(
        "weight decay without the learning rate",
        "param ← param (1 − weight_decay).",
        "ADAM.1",
        "param ← param (1 − lr · weight_decay)",
        lambda p: {"decayed": lambda param, lr, decay: param * (1 - decay)},
    ),
)
