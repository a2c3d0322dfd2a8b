"""Known mistakes in a whole step of AdamW: clipping, and the bias."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece


def _mistake(
    name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], equation: str = "CLIP.1"
) -> Mistake:
    return Mistake(name, "adamw_step", explains, equation, fix, apply)


RIGHT = "multiply all gradients by min(1, max_norm/norm), with the norm of all of them together"


def _by_its_own(grad: Array, scale: float, max_norm: float) -> Array:
    norm = float(np.linalg.norm(grad))
    return grad * (max_norm / norm if norm > max_norm else 1.0)


def _by_value(grad: Array, scale: float, max_norm: float) -> Array:
    return np.clip(grad, -max_norm, max_norm)


MISTAKES = (
    _mistake(
        "no clipping",
        "Gradients beyond max_norm are used as they are.",
        RIGHT,
        lambda p: {"clip": lambda norm, max_norm: 1.0},
    ),
    _mistake(
        "each gradient clipped by its own norm",
        "dweight and dbias get different factors, which changes the direction of the step.",
        RIGHT,
        lambda p: {"clipped_weight": _by_its_own, "clipped_bias": _by_its_own},
    ),
    _mistake(
        "entries clipped in place of the norm",
        "Every entry is limited to ±max_norm, which changes the direction of the gradient.",
        RIGHT,
        lambda p: {"clipped_weight": _by_value, "clipped_bias": _by_value},
    ),
    _mistake(
        "gradients scaled up to max_norm",
        "max_norm/norm is used also where it is above 1: small gradients are enlarged.",
        RIGHT,
        lambda p: {"clip": lambda norm, max_norm: max_norm / norm},
    ),
    _mistake(
        "the squared norm in the clipping",
        "The root is missing from the norm: √(Σ g²).",
        RIGHT,
        lambda p: {"total_norm": lambda dweight, dbias: p.total_norm(dweight, dbias) ** 2},
    ),
    _mistake(
        "the bias left out of the norm",
        "The norm is that of dweight alone.",
        RIGHT,
        lambda p: {"total_norm": lambda dweight, dbias: float(np.linalg.norm(dweight))},
    ),
    _mistake(
        "the bias not clipped",
        "Only dweight is multiplied by the factor.",
        RIGHT,
        lambda p: {"clipped_bias": lambda dbias, scale, max_norm: 1.0 * dbias},
    ),
    _mistake(
        "the bias decayed as well",
        "Weight decay is for matrices; biases and the weights of norms are not decayed.",
        "param ← param (1 − lr · weight_decay) for the weight only",
        lambda p: {"decay_of_bias": lambda decay: decay},
        "ADAM.1",
    ),
)
