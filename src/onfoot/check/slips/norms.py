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


def _scale_of(normed: Array, case: Case) -> Any:
    """1/σ, from ā and x."""
    x = case.inputs[0]
    centred = x - x.mean(axis=-1, keepdims=True)
    square = (centred * centred).sum(axis=-1, keepdims=True)
    return np.where(square == 0, 1, (normed * centred).sum(axis=-1, keepdims=True) / np.where(square == 0, 1, square))


def _eps(p: Pieces, value: float) -> dict[str, Piece]:
    return {"rstd": lambda variance, eps: p.rstd(variance, value)}
