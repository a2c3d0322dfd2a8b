"""Slips in norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import EPS, fitted, named


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "eps" not in layer.options and "rstd" in layer.pieces.names():
        yield fitted(layer, "right with another eps", "eps", EPS, "use the eps of the contract", _eps)
    if layer.name in ("layer_norm", "rms_norm"):
        yield from _norms(layer)


def _norms(layer: Layer) -> Iterator[Mistake]:
    piece, mean = (
        ("along_term", "mean(g ∘ ā)") if "along_term" in layer.pieces.names() else ("rms_along", "mean(g ∘ x̂)")
    )
    yield named(
        layer,
        f"{mean} is halved (2 times too small): the factor 2 of the derivative of a square is missing",
        "the derivative of the mean of squares by x has a factor 2, which cancels the ½ of the root",
        lambda p, case: {piece: lambda *a: 0.5 * getattr(p, piece)(*a)},
        piece,
        cost=1.19,
    )
    yield from _own_sums(layer)
    squares, what = ("variance", "(x − mean)²") if layer.name == "layer_norm" else ("mean_square", "x²")
    yield named(
        layer,
        f"the sum of {what} in place of its mean, in both passes: an L2 norm",
        "divide the sum by the number of features, in the forward and in the backward pass",
        lambda p, case: {
            squares: lambda x: (x * x).sum(axis=-1, keepdims=True),
            piece: lambda normed, g: (normed * g).sum(axis=-1, keepdims=True),
        },
        *(squares, piece),
    )
    if layer.name == "layer_norm":
        yield named(
            layer,
            "x − mean in place of one of the two ā in the last term of dx, ā · mean(g ∘ ā)",
            "dx = (g − mean(g) − ā · mean(g ∘ ā))/σ: both are ā = (x − mean)/σ",
            lambda p, case: {"along_term": lambda normed, g: p.along_term(normed, g) / _scale_of(normed, case)},
            "along_term",
        )


def _own_sums(layer: Layer) -> Iterator[Mistake]:
    """Slips of one sum: a term of dx over d − 1, the gradient of the weight from the output, a mean in RMS norm."""
    rms = layer.name == "rms_norm"
    terms = (("rms_along", "mean(g ∘ x̂)"),) if rms else (("along_term", "mean(g ∘ ā)"), ("mean_term", "mean(g)"))
    for piece, mean in terms:

        def unbiased(*a: Array, piece: str = piece) -> Array:
            n = a[-1].shape[-1]
            found: Array = getattr(layer.pieces, piece)(*a) * (n / max(n - 1, 1))
            return found

        yield named(
            layer,
            f"{mean} is divided by d − 1 in place of d, in dx",
            f"{mean} is the sum over the features, divided by their number d",
            lambda p, case, piece=piece, unbiased=unbiased: {piece: unbiased},
            piece,
        )

    if rms:
        yield named(
            layer,
            "the variance in place of the mean of squares",
            "rms = √(mean(x²) + eps), without subtracting the mean",
            lambda p, case: {"mean_square": lambda x: x.var(axis=-1, keepdims=True)},
            "mean_square",
        )
    else:  # in RMS norm, without a bias, dweight from the output is also that from dout ∘ weight

        def from_output(p: Pieces, case: Case) -> dict[str, Piece]:
            _, weight, bias, _ = case.inputs
            return {"norm_dweight": lambda dy, normed, x: p.norm_dweight(dy, normed * weight + bias, x)}

        yield named(
            layer,
            "dweight from the output in place of the normalised features",
            "dweight = Σ_tokens dout ∘ ā: before the weight and the bias",
            from_output,
            "norm_dweight",
        )
        yield named(
            layer,
            "eps outside the root, in the last factor of dx alone",
            "divide by √(variance + eps), as the forward pass does",
            lambda p, case: {"norm_dx": lambda bracket, rstd: p.norm_dx(bracket, _eps_outside(rstd))},
            "norm_dx",
        )


def _eps_outside(rstd: Array, eps: float = 1e-5) -> Array:
    """1/(√variance + eps), from 1/√(variance + eps)."""
    found: Array = 1 / (np.sqrt(np.maximum(1 / rstd**2 - eps, 0)) + eps)
    return found


def _scale_of(normed: Array, case: Case) -> Any:
    """1/σ, from ā and x."""
    x = case.inputs[0]
    centred = x - x.mean(axis=-1, keepdims=True)
    square = (centred * centred).sum(axis=-1, keepdims=True)
    return np.where(square == 0, 1, (normed * centred).sum(axis=-1, keepdims=True) / np.where(square == 0, 1, square))


def _eps(p: Pieces, value: float) -> dict[str, Piece]:
    return {"rstd": lambda variance, eps: p.rstd(variance, value)}
