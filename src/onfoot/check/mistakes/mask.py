"""What goes wrong with attention's mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece
from onfoot.ops.attention import softmax


def weights_masked_by_product(scores: Array, mask: Array) -> Array:
    """softmax(m ∘ scores): what is masked has the score 0, hence the weight exp(0)."""
    return softmax(mask * scores)


def weights_masked_after_softmax(scores: Array, mask: Array) -> Array:
    """m ∘ softmax(scores): the rows no longer sum to 1, and the normaliser has seen the future."""
    return mask * softmax(scores)


def plain_softmax(scores: Array) -> Array:
    """exp over its sum, the maximum taken off first: enough for finite scores."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def masked_by_adding_a_product(scores: Array, mask: Array) -> Array:
    """s + (1 − m)(−inf): 0 · inf is nan, so what should stay visible is lost."""
    return scores + (1 - mask) * -math.inf


def masked_by_a_large_number(scores: Array, mask: Array) -> Array:
    """−1e9 where masked: −inf all the same in float16."""
    return scores + np.where(mask, 0, -1e9).astype(scores.dtype)


def _above_the_diagonal(shift: int) -> Callable[..., Array]:
    """A mask that is moved by some tokens against the right one."""
    return lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None] + (n_k - n_q) + shift


def _mistake(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict[str, Piece]], errata: str = ""
) -> Mistake:
    return Mistake(name, "attention", explains, equation, fix, apply, errata, needs={"causal": True})


MINUS_INFINITY = "np.where(mask, scores, -inf) before softmax"

MISTAKES = (
    _mistake(
        "the mask as a product before softmax",
        "A hidden score becomes 0 and its weight exp(0) = 1 over the sum: the future is seen.",
        "13",
        MINUS_INFINITY,
        lambda p: {"weights": weights_masked_by_product},
        "E1, E2",
    ),
    _mistake(
        "the mask as a product before softmax, in both passes",
        "A hidden score becomes 0 and its weight exp(0) = 1 over the sum; the gradient belongs to that forward pass.",
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
        "The normaliser has seen the future and the rows do not sum to 1; the gradient belongs to that forward pass.",
        "13",
        MINUS_INFINITY,
        lambda p: {
            "weights": weights_masked_after_softmax,
            "dscores": lambda drho, rho, dots, scores, mask: (np.where(mask, drho, 0) - dots) * softmax(scores),
        },
        "E3",
    ),
    _mistake(
        "the mask after softmax, and masked weights in its gradient",
        "The normaliser has seen the future; eq 25 is then used with weights whose rows do not sum to 1.",
        "13",
        MINUS_INFINITY,
        lambda p: {"weights": weights_masked_after_softmax},
        "E3",
    ),
    _mistake(
        "no mask",
        "Every token sees all others: the gradient of attention that is not causal.",
        "13",
        f"{MINUS_INFINITY}; or check it with causal=False (--no-causal), if that is what it should be",
        lambda p: {"mask": lambda n_q, n_k, causal: None},
    ),
    _mistake(
        "a mask that lets the next token through",
        "The mask is off by one: token t sees token t + 1.",
        "13",
        "a token sees itself and what came before: np.tril with k=0",
        lambda p: {"mask": _above_the_diagonal(1)},
    ),
    _mistake(
        "the mask transposed",
        "A token sees itself and what comes after: the upper triangle was kept in place of the lower.",
        "13",
        "row t of the mask is for the query at t, and is 1 up to column t",
        lambda p: {"mask": lambda n_q, n_k, causal: np.arange(n_k) >= np.arange(n_q)[:, None] + (n_k - n_q)},
    ),
    _mistake(
        "the mask aligned with the first key",
        "Query i sees keys up to i; with as many keys as queries that is right, behind cached keys it is not.",
        "13",
        "the last query stands beside the last key: query i sees keys up to i + (n_keys − n_queries)",
        lambda p: {"mask": lambda n_q, n_k, causal: np.arange(n_k) <= np.arange(n_q)[:, None]},
        "E16",
    ),
    _mistake(
        "nan where a query sees nothing",
        "A row of −inf has no softmax: −inf − (−inf) is nan.",
        "15",
        "give such a row the weight 0 everywhere: divide by 1 where the sum is 0",
        lambda p: {
            "weights": lambda scores, mask: plain_softmax(scores if mask is None else np.where(mask, scores, -math.inf))
        },
        "E4",
    ),
    _mistake(
        "equal weights where a query sees nothing",
        "Masking with a large finite number makes a row of equal scores: hidden tokens get weight.",
        "13",
        "mask with −inf, and give such a row the weight 0 everywhere",
        lambda p: {
            "weights": lambda scores, mask: plain_softmax(
                scores if mask is None else masked_by_a_large_number(scores, mask)
            )
        },
        "E4",
    ),
)
