"""Slips in dropout: the factor 1/(1 − p), and dropout in another place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import named

KEEP = "multiply by keep itself, which is 0 or 1/(1 − p), in both passes"
WEIGHTS = "dropout acts on the weights, after softmax: out = (keep ∘ ρ) v"


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    """The slips of a layer with dropout."""
    if "dropped" not in layer.pieces.names():
        return

    def keep_of(case: Case) -> Array:
        return case.inputs[layer.arguments.index("keep")]

    yield named(
        layer,
        "1/(1 − p) missing from dρ: the mask is taken as zeros and ones",
        KEEP,
        lambda p, case: {"through_dropout": lambda drho, keep: drho * (keep > 0)},
        "through_dropout",
    )
    yield named(
        layer,
        "1/(1 − p) missing from dv: the mask is taken as zeros and ones",
        KEEP,
        lambda p, case: {"dropped": lambda rho, keep: rho * (keep > 0)},
        "dropped",
    )
    yield named(
        layer,
        "keep missing from dρ, though not from its row sum (that of dout ∘ the output)",
        "multiply dρ = dout vᵗ by keep before the gradient of softmax",
        lambda p, case: {
            "through_dropout": lambda drho, keep: drho,
            "row_dots": lambda drho, rho: p.row_dots(drho * keep_of(case), rho),
        },
        "through_dropout",
        "row_dots",
    )
    yield named(
        layer,
        "the weights are divided by their sum again after dropout",
        WEIGHTS,
        lambda p, case: {"dropped": lambda rho, keep: rho * keep / (rho * keep).sum(axis=-1, keepdims=True)},
        "dropped",
    )

    def on_scores(p: Pieces, case: Case, back: bool) -> dict[str, Piece]:
        keep = keep_of(case)
        return {
            "scores": lambda q, k: p.scores(q, k) * keep,
            "dropped": lambda rho, _: rho,
            "through_dropout": lambda drho, _: drho,
            "dscores_kept": lambda dscores, _: dscores * keep if back else dscores,
        }

    pieces = "scores", "dropped", "through_dropout", "dscores_kept"
    says = "dropout multiplies the scores, before softmax"
    yield named(layer, says, WEIGHTS, lambda p, case: on_scores(p, case, True), *pieces)
    yield named(layer, f"{says}, in the forward pass", WEIGHTS, lambda p, case: on_scores(p, case, False), *pieces)
