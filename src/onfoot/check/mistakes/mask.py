"""Known mistakes in the attention mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.ops.attention import softmax


def weights_masked_by_product(scores: Array, mask: Array) -> Array:
    """softmax(m ∘ scores): a masked score is 0, and its weight exp(0)."""
    return softmax(mask * scores)


def weights_masked_after_softmax(scores: Array, mask: Array) -> Array:
    """m ∘ softmax(scores): the rows do not sum to 1, and the denominator includes future tokens."""
    return mask * softmax(scores)


def plain_softmax(scores: Array) -> Array:
    """Softmax with the maximum subtracted: sufficient for finite scores."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def masked_by_adding_a_product(scores: Array, mask: Array) -> Array:
    """s + (1 − m)(−inf): 0 · inf is nan, so unmasked scores are lost."""
    return scores + (1 - mask) * -math.inf


def masked_by_a_large_number(scores: Array, mask: Array) -> Array:
    """−1e9 where masked, which is −inf in float16."""
    return scores + np.where(mask, 0, -1e9).astype(scores.dtype)


def _shifted_mask(shift: int) -> Callable[..., Array]:
    """The causal mask, shifted by some tokens."""
    return lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None] + (n_k - n_q) + shift


def _mistake(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = ""
) -> Mistake:
    return Mistake(name, "attention", explains, equation, fix, apply, errata, needs={"causal": True})


MINUS_INFINITY = "np.where(mask, scores, -inf) before softmax"

MISTAKES = (
    _mistake(
        "the mask multiplied into the scores",
        "A masked score becomes 0, so its weight is exp(0) = 1 over the sum: future tokens are not masked.",
        "13",
        MINUS_INFINITY,
        lambda p: {"weights": weights_masked_by_product},
        "E1, E2",
    ),
    _mistake(
        "the mask multiplied into the scores, in both passes",
        "A masked score becomes 0, so its weight is exp(0) = 1 over the sum; the gradient matches this forward pass.",
        "13",
        MINUS_INFINITY,
        lambda p: {
            "weights": weights_masked_by_product,
            "dscores": lambda drho, rho, dots, scores, mask: mask * ((drho - dots) * rho),
        },
        "E1",
    ),
    _mistake(
        "the mask after softmax",
        "The denominator includes future tokens and rows do not sum to 1; the gradient matches this forward pass.",
        "13",
        MINUS_INFINITY,
        lambda p: {
            "weights": weights_masked_after_softmax,
            "dscores": lambda drho, rho, dots, scores, mask: (np.where(mask, drho, 0) - dots) * softmax(scores),
        },
        "E3",
    ),
    _mistake(
        "the mask after softmax, and masked weights in the softmax gradient",
        "The denominator includes future tokens; eq 25 is then used with weights whose rows do not sum to 1.",
        "13",
        MINUS_INFINITY,
        lambda p: {"weights": weights_masked_after_softmax},
        "E3",
    ),
    _mistake(
        "no mask",
        "Every token attends to all others: this is the gradient of non-causal attention.",
        "13",
        f"{MINUS_INFINITY}; or check with causal=False (--no-causal) if that is intended",
        lambda p: {"mask": lambda n_q, n_k, causal: None},
    ),
    _mistake(
        "a mask that lets the next token through",
        "The mask is off by one: token t attends to token t + 1.",
        "13",
        "a token attends to itself and earlier tokens: np.tril with k=0",
        lambda p: {"mask": _shifted_mask(1)},
    ),
    _mistake(
        "the mask transposed",
        "A token attends to itself and later tokens: the upper triangle was kept instead of the lower.",
        "13",
        "row t of the mask is for the query at t, and is 1 up to column t",
        lambda p: {"mask": lambda n_q, n_k, causal: np.arange(n_k) >= np.arange(n_q)[:, None] + (n_k - n_q)},
    ),
    _mistake(
        "the mask aligned with the first key",
        "Query i attends to keys up to i: correct with as many keys as queries, wrong with a KV cache.",
        "13",
        "align the last query with the last key: query i attends to keys up to i + (n_keys − n_queries)",
        lambda p: {"mask": lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None]},
        "E16",
    ),
    _mistake(
        "the diagonal masked in the gradient of the scores",
        "The gradient of a token's score with itself is set to 0, as if a token did not attend to itself.",
        "25",
        "the gradient of the scores is 0 above the diagonal only, and there ρ = 0 makes it 0 by itself",
        lambda p: {
            "dscores": lambda drho, rho, dots, scores, mask: np.where(
                _shifted_mask(-1)(*scores.shape[-2:], True), p.dscores(drho, rho, dots, scores, mask), 0
            )
        },
    ),
    _mistake(
        "nan in fully masked rows",
        "Softmax of a row of −inf is undefined: −inf − (−inf) is nan.",
        "15",
        "set all weights of such a row to 0: divide by 1 where the sum is 0",
        lambda p: {
            "weights": lambda scores, mask: plain_softmax(scores if mask is None else np.where(mask, scores, -math.inf))
        },
        "E4",
    ),
    _mistake(
        "equal weights in fully masked rows",
        "A large finite mask value makes all scores of the row equal: masked tokens get weight.",
        "13",
        "mask with −inf, and set all weights of such a row to 0",
        lambda p: {
            "weights": lambda scores, mask: plain_softmax(
                scores if mask is None else masked_by_a_large_number(scores, mask)
            )
        },
        "E4",
    ),
)
