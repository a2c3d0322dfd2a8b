"""Attention as the checker knows it, with masks that are applied again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onfoot.check.layer import Array, Mistake
from onfoot.check.layers import LAYERS
from onfoot.check.layers.attention import PIECES
from onfoot.learn.layers.own import mistake

Mask = Callable[[Array], Array]  # (..., Tq, Tk) -> the mask of such an array, (Tq, Tk)


def visible(x: Array) -> Array:
    """The causal mask: the last query stands at the last key."""
    return np.asarray(PIECES.mask(*x.shape[-2:], True))


def lower_triangle(x: Array) -> Array:
    """np.tril of ones: the first query stands at the first key."""
    return np.tril(np.ones(x.shape[-2:]))


def _masked(name: str, explains: str, mask: Mask, **needs: bool) -> tuple[Mistake, ...]:
    """The mask on the gradient of the scores, and on that of the weights; neither changes a square causal case."""
    fix = "no mask in the backward pass: rho is 0 in every masked place already"

    def one(where: str, pieces: dict[str, Callable[..., Array]]) -> Mistake:
        return replace(mistake("attention", "25", f"{name} {where}", explains, fix, **pieces), needs=needs)

    return (
        one(
            "applied to the gradient of the scores",
            {"dscores": lambda drho, rho, dots, scores, m: PIECES.dscores(drho, rho, dots, scores, m) * mask(rho)},
        ),
        one(
            "applied to dρ",
            {"drho": lambda dout, v: PIECES.drho(dout, v) * mask(PIECES.drho(dout, v))},
        ),
    )


MISTAKES = (
    *_masked(
        "the causal mask",
        "It is right where attention is causal, and wrong with causal=False. ρ is 0 in every masked place already: no "
        "mask is needed.",
        visible,
        causal=False,
    ),
    *_masked(
        "np.tril",
        "It lets the first query stand at the first key; with fewer queries than keys the last ones meet. And with "
        "causal=False nothing is masked. ρ is 0 in every masked place already: no mask is needed.",
        lower_triangle,
    ),
)

MASKED_ATTENTION = replace(LAYERS["attention"], mistakes=MISTAKES)
