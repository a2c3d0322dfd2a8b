"""Known mistakes in one head of self-attention: its three paths, its biases, its dropout."""

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


SUM = "da = Δ_q + Δ_k + Δ_v: a is the input of queries, keys and values"

MISTAKES = (
    _head(
        "only the gradient through the queries",
        "The tokens are the input of queries, keys and values, but only the gradient of the queries is passed back.",
        "33",
        SUM,
        lambda p: {"three_paths": lambda d_q, d_k, d_v: d_q},
        "E40",
    ),
    _head(
        "only the gradient through the values",
        "The attention weights are held constant: the gradient through queries and keys is missing.",
        "33",
        SUM,
        lambda p: {"three_paths": lambda d_q, d_k, d_v: d_v},
        "E40",
    ),
    _head(
        "the gradients of a used for the parameters",
        "Δ_q, Δ_k, Δ_v are gradients of a; the parameters need the gradients of q, k and v.",
        "31.a",
        "dw_q = aᵗ dq with dq = Δ_raw k, before the product with w_qᵗ; the same for k and v",
        lambda p: {"at_projection": lambda dy, weight: dy @ weight.T},
        "E17",
    ),
    _head(
        "db_k = 0 with rotary embeddings",
        "A key bias shifts all scores of a row equally only if the keys are not rotated.",
        "29",
        "db_k = Σ_tokens dk, of the keys before rotation",
        lambda p: {"db_k": lambda dbias: np.zeros_like(dbias)},
        "E12",
        rotary=True,
    ),
    Mistake(
        "db_v without dropout",
        "head_dropout",
        "db_v = Σ_tokens dout assumes that the rows of the weights sum to 1; with dropout they do not.",
        "24",
        "db_v = Σ_tokens (keep ∘ ρ)ᵗ dout",
        lambda p: {"db_v": lambda dbias, dout: rows(dout).sum(axis=0)},
        "E11",
    ),
    Mistake(
        "dropout left out of the backward pass",
        "head_dropout",
        "The gradient is not multiplied by keep: dropped weights get a gradient, and kept ones too small a gradient.",
        "DO.2",
        "use keep ∘ ρ in dv, and keep ∘ dρ before the gradient of softmax",
        lambda p: {"dropped": lambda rho, keep: rho, "through_dropout": lambda drho, keep: drho},
    ),
    Mistake(
        "weights after dropout in the softmax gradient",
        "head_dropout",
        "keep ∘ ρ is used instead of ρ, but softmax comes before dropout.",
        "25",
        "ds = (keep ∘ dρ − Σ keep ∘ dρ ∘ ρ) ∘ ρ, with ρ the output of softmax",
        lambda p: {"rho_for_softmax": lambda rho, keep: rho * keep, "through_dropout": lambda drho, keep: drho},
    ),
)
