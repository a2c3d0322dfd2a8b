"""Known mistakes in layer norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onfoot.arrays import rows
from onfoot.check.layer import Array, Mistake, Piece

# wrong variance and 1/σ


def variance_unbiased(centred: Array) -> Array:
    """Divided by d − 1, as in PyTorch's `var` and `std`."""
    return (centred * centred).sum(axis=-1, keepdims=True) / (centred.shape[-1] - 1)


def rstd_without_eps(variance: Array, eps: float) -> Array:
    """1/σ as printed: constant features divide by 0."""
    return 1 / np.sqrt(variance)


def rstd_eps_outside_root(variance: Array, eps: float) -> Array:
    return 1 / (np.sqrt(variance) + eps)


# the term of (40) along ā, for another σ


def along_eps_outside_root(normed: Array, dnormed: Array) -> Array:
    """With σ' = σ + eps, the mean of ā² is (σ/σ')², and dσ'/dx divides by σ, not σ'."""
    along, square = (normed * dnormed).mean(axis=-1, keepdims=True), (normed * normed).mean(axis=-1, keepdims=True)
    return along / np.sqrt(np.where(square == 0, 1, square))


def along_unbiased(normed: Array, dnormed: Array) -> Array:
    return (normed * dnormed).sum(axis=-1, keepdims=True) / (normed.shape[-1] - 1)


# the two means of (40) over tokens, as in batch norm


def mean_over_tokens(dnormed: Array) -> Array:
    return dnormed.mean(axis=-2, keepdims=True)


def along_over_tokens(normed: Array, dnormed: Array) -> Array:
    return (normed * dnormed).mean(axis=-2, keepdims=True)


def weight_gradient_diag_builds(normed: Array, dy: Array) -> Array:
    """diag in (41) read as in (37): it builds a diagonal matrix."""
    return np.diag(np.diag(rows(normed).T @ rows(dy)))


def nothing(*arguments: Array) -> Array:
    """A missing term."""
    return np.zeros(())


def _mistake(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = ""
) -> Mistake:
    return Mistake(name, "layer_norm", explains, equation, fix, apply, errata)


RIGHT_40 = "dx = (g − mean(g) − ā · mean(g ∘ ā))/σ with g = dout ∘ weight"

MISTAKES = (
    _mistake(
        "γ outside the means",
        "weight ∘ (dout − mean(dout) − ā · mean(dout ∘ ā))/σ: correct only if all weights are equal, as initially.",
        "40",
        f"multiply dout by weight first: {RIGHT_40}",
        lambda p: {
            "dnormed": lambda dy, weight: dy,
            "bracket": lambda g, mean, along, normed, weight: weight * (g - mean - normed * along),
        },
    ),
    _mistake(
        "γ missing from dx",
        "dout is used instead of dout ∘ weight.",
        "40",
        RIGHT_40,
        lambda p: {"dnormed": lambda dy, weight: dy},
    ),
    _mistake(
        "eps outside the root",
        "σ = √variance + eps: wrong where the variance is small.",
        "36",
        "σ = √(variance + eps), in both ā and dx",
        lambda p: {"rstd": rstd_eps_outside_root},
        "E28",
    ),
    _mistake(
        "eps outside the root, in both passes",
        "σ = √variance + eps, in the gradient as well: wrong where the variance is small.",
        "36",
        "σ = √(variance + eps)",
        lambda p: {"rstd": rstd_eps_outside_root, "along_term": along_eps_outside_root},
    ),
    _mistake(
        "no eps",
        "σ = √variance: nan for constant features, and wrong where the variance is small.",
        "36",
        "σ = √(variance + eps)",
        lambda p: {"rstd": rstd_without_eps},
        "E28",
    ),
    _mistake(
        "unbiased variance",
        "The variance is divided by d − 1 (ddof=1, PyTorch's default); layer norm divides by d.",
        "36",
        "var(axis=-1), with unbiased=False or correction=0 in PyTorch",
        lambda p: {"variance": variance_unbiased},
        "E28",
    ),
    _mistake(
        "unbiased variance, in both passes",
        "The variance is divided by d − 1, in the gradient as well.",
        "36",
        "var(axis=-1), with unbiased=False or correction=0 in PyTorch",
        lambda p: {"variance": variance_unbiased, "along_term": along_unbiased},
    ),
    _mistake(
        "the means in dx over tokens",
        "The two means of eq 40 are taken over tokens, as in batch norm; layer norm takes them over features.",
        "40",
        "mean over the last axis, with keepdims=True",
        lambda p: {"mean_term": mean_over_tokens, "along_term": along_over_tokens},
        "E28",
    ),
    _mistake(
        "sums in place of means in dx",
        "The two subtracted terms lack the factor 1/d.",
        "40",
        RIGHT_40,
        lambda p: {
            "mean_term": lambda g: g.sum(axis=-1, keepdims=True),
            "along_term": lambda normed, g: (normed * g).sum(axis=-1, keepdims=True),
        },
    ),
    _mistake(
        "the mean held constant",
        "The term mean(g) is missing: the mean depends on x as well.",
        "40",
        RIGHT_40,
        lambda p: {"mean_term": nothing},
    ),
    _mistake(
        "the variance held constant",
        "The term ā · mean(g ∘ ā) is missing: σ depends on x as well.",
        "40",
        RIGHT_40,
        lambda p: {"along_term": nothing},
    ),
    _mistake(
        "mean and variance held constant",
        "dx = g/σ: both depend on x.",
        "40",
        RIGHT_40,
        lambda p: {"mean_term": nothing, "along_term": nothing},
    ),
    _mistake(
        "1/σ missing from dx",
        "The bracket of eq 40 is not divided by σ.",
        "40",
        RIGHT_40,
        lambda p: {"norm_dx": lambda bracket, rstd: bracket},
    ),
    _mistake(
        "the variance in place of σ in dx",
        "The bracket of eq 40 is divided by σ² (plus eps), not by its square root.",
        "40",
        RIGHT_40,
        lambda p: {"norm_dx": lambda bracket, rstd: bracket * rstd**2},
    ),
    _mistake(
        "dweight from x in place of ā",
        "Σ dout ∘ x: the weight multiplies the normalised features.",
        "41",
        "dweight = Σ_tokens dout ∘ ā",
        lambda p: {"norm_dweight": lambda dy, normed, x: rows(dy * x).sum(axis=0)},
    ),
    _mistake(
        "dweight as a diagonal matrix",
        "diag builds a matrix instead of extracting the diagonal: dweight has shape (d, d).",
        "41",
        "dweight = Σ_tokens dout ∘ ā, a vector",
        lambda p: {"norm_dweight": lambda dy, normed, x: weight_gradient_diag_builds(normed, dy)},
        "E28",
    ),
    _mistake(
        "dweight and dbias of a single sequence",
        "The sums include only the last sequence; all sequences of a batch share the weights.",
        "41",
        "sum over batch and tokens",
        lambda p: {
            "norm_dweight": lambda dy, normed, x: (dy * normed)[-1].sum(axis=0),
            "norm_dbias": lambda dy: dy[-1].sum(axis=0),
        },
    ),
)
