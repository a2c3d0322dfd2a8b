"""Slips in DPO: all pairs compared, the reference with the wrong sign, another loss of the margin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import named
from onfoot.ops.dpo import sigmoid

PUSHES: dict[str, Piece] = {
    "the derivative of σ(m), σ(m) σ(−m), in place of σ(−m), that of −log σ(m)": lambda m: sigmoid(m) * sigmoid(-m),
    "the derivative of the hinge loss max(0, 1 − m) in place of that of −log σ(m)": lambda m: 1.0 * (m < 1),
    "1/σ(m), the derivative of the logarithm alone, in place of σ(−m)": lambda m: 1 / sigmoid(m),
    "σ(−m) is squared": lambda m: sigmoid(-m) ** 2,
    "−log σ(m), the loss itself, in place of σ(−m)": lambda m: np.logaddexp(0, -m),
}


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "gain_chosen" in layer.pieces.names():
        for divided, squared in (("N²", True), ("N", False)):
            yield named(
                layer,
                "every chosen answer is compared with every rejected one: (N, 1) − (N) is (N, N); "
                f"divided by {divided}",
                "subtract arrays of the same shape, (N) and (N): each pair is compared with itself only",
                _all_pairs(squared),
                "margin",
                "pairs",
                "dchosen",
                "drejected",
            )
        yield named(
            layer,
            "the reference's log-ratio is added, not subtracted; or ref_chosen and ref_rejected are exchanged",
            "m = beta [(chosen − ref_chosen) − (rejected − ref_rejected)]",
            lambda p, case: {"gain_chosen": lambda a, ref: a + ref, "gain_rejected": lambda a, ref: a + ref},
            "gain_chosen",
            "gain_rejected",
        )
        for says, push in PUSHES.items():
            yield named(
                layer,
                says,
                "the derivative of −log σ(m) by m is −σ(−m)",
                lambda p, case, push=push: {"push": push},
                "push",
            )


def _all_pairs(squared: bool) -> Callable[[Pieces, Case], dict[str, Piece]]:
    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        def margin(gain_chosen: Array, gain_rejected: Array, beta: float) -> Array:
            found: Array = p.margin(gain_chosen[:, None], gain_rejected, beta)  # (N, N)
            return found

        return {
            "margin": margin,
            "pairs": lambda margin: margin.size if squared else len(margin),
            "dchosen": lambda weight: p.dchosen(weight).sum(axis=1),
            "drejected": lambda weight: p.drejected(weight).sum(axis=0),
        }

    return apply
