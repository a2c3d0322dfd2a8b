"""Known mistakes in RMS norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.arrays import rows
from onfoot.check.layer import Mistake, Piece
from onfoot.check.mistakes.layer_norm import along_eps_outside_root, rstd_eps_outside_root, rstd_without_eps


def _mistake(
    name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], equation: str = "RMS.3"
) -> Mistake:
    return Mistake(name, "rms_norm", explains, equation, fix, apply)


RIGHT = "dx = (g − x̂ · mean(g ∘ x̂))/rms with g = dout ∘ weight and x̂ = x/rms"

MISTAKES = (
    _mistake(
        "γ outside the mean",
        "weight ∘ (dout − x̂ · mean(dout ∘ x̂))/rms: correct only if all weights are equal, as initially.",
        f"multiply dout by weight first: {RIGHT}",
        lambda p: {
            "rms_dnormed": lambda dy, weight: dy,
            "rms_bracket": lambda g, mean, along, weight: weight * (g - mean - along),
        },
    ),
    _mistake(
        "γ missing from dx",
        "dout is used instead of dout ∘ weight.",
        RIGHT,
        lambda p: {"rms_dnormed": lambda dy, weight: dy},
    ),
    _mistake(
        "the root mean square held constant",
        "dx = g/rms: the term x̂ · mean(g ∘ x̂) is missing, but the root mean square depends on x.",
        RIGHT,
        lambda p: {"rms_along": lambda normed, g: np.zeros(())},
    ),
    _mistake(
        "layer norm's mean subtracted",
        "The mean of g is subtracted as in layer norm; RMS norm does not subtract means.",
        RIGHT,
        lambda p: {"rms_mean_term": lambda g: g.mean(axis=-1, keepdims=True)},
    ),
    _mistake(
        "features centred first",
        "The mean of x is subtracted before the root mean square: that is layer norm.",
        "rms = √(mean(x²) + eps), without subtracting the mean",
        lambda p: {"rms_centred": lambda x: x - x.mean(axis=-1, keepdims=True)},
        "RMS.1",
    ),
    _mistake(
        "eps outside the root",
        "rms = √mean(x²) + eps: wrong where x is small.",
        "rms = √(mean(x²) + eps)",
        lambda p: {"rms_rstd": rstd_eps_outside_root},
        "RMS.1",
    ),
    _mistake(
        "eps outside the root, in both passes",
        "rms = √mean(x²) + eps, in the gradient as well: wrong where x is small.",
        "rms = √(mean(x²) + eps)",
        lambda p: {
            "rms_rstd": rstd_eps_outside_root,
            "rms_along": along_eps_outside_root,
        },
        "RMS.1",
    ),
    _mistake(
        "no eps",
        "rms = √mean(x²): wrong where x is small, nan where it is 0.",
        "rms = √(mean(x²) + eps)",
        lambda p: {"rms_rstd": rstd_without_eps},
        "RMS.1",
    ),
    _mistake(
        "a sum in place of the mean in dx",
        "x̂ · Σ(g ∘ x̂) lacks the factor 1/d.",
        RIGHT,
        lambda p: {"rms_along": lambda normed, g: (normed * g).sum(axis=-1, keepdims=True)},
    ),
    _mistake(
        "x in place of x̂ in dx",
        "x · mean(g ∘ x̂): the second factor 1/rms is missing.",
        RIGHT,
        lambda p: {"rms_along_term": lambda along, normed, x: x * along},
    ),
    _mistake(
        "the mean over tokens",
        "mean(g ∘ x̂) is taken over tokens instead of the features of one token.",
        RIGHT,
        lambda p: {"rms_along": lambda normed, g: (normed * g).mean(axis=-2, keepdims=True)},
    ),
    _mistake(
        "1/rms missing from dx",
        "The bracket is not divided by the root mean square.",
        RIGHT,
        lambda p: {"rms_dx": lambda bracket, rstd: bracket},
    ),
    _mistake(
        "the mean of squares in place of rms in dx",
        "The bracket is divided by the square of rms, not by rms itself.",
        RIGHT,
        lambda p: {"rms_dx": lambda bracket, rstd: bracket * rstd**2},
    ),
    _mistake(
        "dweight from x in place of x̂",
        "Σ dout ∘ x: the weight multiplies the normalised features.",
        "dweight = Σ_tokens dout ∘ x̂",
        lambda p: {"rms_dweight": lambda dy, normed, x: rows(dy * x).sum(axis=0)},
        "RMS.4",
    ),
)
