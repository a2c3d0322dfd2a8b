"""What goes wrong around one head of self-attention: its three paths, its biases, its dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onfoot.arrays import rows
from onfoot.check.layer import Mistake, Piece


def _head(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str, **needs: Any
) -> Mistake:
    return Mistake(name, "head", explains, equation, fix, apply, errata, needs=needs)


SUM = "da = Δ_q + Δ_k + Δ_v: a goes into the queries, the keys and the values"

MISTAKES = (
    _head(
        "the queries' path alone",
        "The tokens are query, key and value at once, but only the gradient of the queries goes back.",
        "33",
        SUM,
        lambda p: {"three_paths": lambda d_q, d_k, d_v: d_q},
        "E40",
    ),
    _head(
        "the values' path alone",
        "The weights are held constant: what goes back through the queries and the keys is lost.",
        "33",
        SUM,
        lambda p: {"three_paths": lambda d_q, d_k, d_v: d_v},
        "E40",
    ),
    _head(
        "the gradients of a in those of the parameters",
        "Δ_q, Δ_k, Δ_v belong to a, behind the weights; the parameters need the gradients of q, k and v.",
        "31.a",
        "dw_q = aᵗ dq with dq = Δ_raw k, before the product with w_qᵗ; the same for k and v",
        lambda p: {"at_projection": lambda dy, weight: dy @ weight.T},
        "E17",
    ),
    _head(
        "db_k = 0 under rotary positions",
        "A bias of the keys shifts a row of scores by the same amount only while keys are not turned.",
        "29",
        "db_k = Σ_tokens dk, of the keys before they are turned",
        lambda p: {"db_k": lambda dbias: np.zeros_like(dbias)},
        "E12",
        rotary=True,
    ),
    Mistake(
        "db_v without the dropped weights",
        "head_dropout",
        "db_v = Σ_tokens dout rests on weights whose rows sum to 1; with dropout they do not.",
        "24",
        "db_v = Σ_tokens (keep ∘ ρ)ᵗ dout",
        lambda p: {"db_v": lambda dbias, dout: rows(dout).sum(axis=0)},
        "E11",
    ),
    Mistake(
        "dropout left out of the backward pass",
        "head_dropout",
        "keep is not multiplied in: weights that were dropped get a gradient, and those kept too small a one.",
        "DO.2",
        "use keep ∘ ρ in dv, and keep ∘ dρ before the gradient of softmax",
        lambda p: {"dropped": lambda rho, keep: rho, "through_dropout": lambda drho, keep: drho},
    ),
    Mistake(
        "the dropped weights in the gradient of softmax",
        "head_dropout",
        "keep ∘ ρ stands where ρ belongs: softmax came before dropout and knows nothing of it.",
        "25",
        "ds = (keep ∘ dρ − Σ keep ∘ dρ ∘ ρ) ∘ ρ, with ρ as softmax made it",
        lambda p: {"softmax_sees": lambda rho, keep: rho * keep, "through_dropout": lambda drho, keep: drho},
    ),
)
