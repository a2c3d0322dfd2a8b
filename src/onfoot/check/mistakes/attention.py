"""Known mistakes in attention: the scale, the gradient of softmax, the products, softmax itself.

The wrong softmax gradients map (dρ, ρ), the gradient of the weights and the weights, to the gradient of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece, transposed
from onfoot.ops.attention import softmax, softmax_backward


def softmax_backward_without_keepdims(drho: Array, rho: Array) -> Array:
    """Row sums without keepdims: for a square matrix, NumPy broadcasts them along the wrong axis."""
    return (drho - (drho * rho).sum(axis=-1)[..., None, :]) * rho


def softmax_backward_over_tokens(drho: Array, rho: Array) -> Array:
    """Sums over the columns."""
    return (drho - (drho * rho).sum(axis=-2, keepdims=True)) * rho


def softmax_backward_with_hadamard(drho: Array, rho: Array) -> Array:
    """[dρ − dρ ∘ ρ] ∘ ρ: nothing is summed."""
    return (drho - drho * rho) * rho


def softmax_backward_minus_mean(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ − mean(dρ ∘ ρ) of each row: its rows sum to 0, but it is not the gradient."""
    ds = drho * rho
    return ds - ds.mean(axis=-1, keepdims=True)


def softmax_backward_matrix_products(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ − ρ dρᵗ ρ, with two matrix products in the last term."""
    return drho * rho - rho @ transposed(drho) @ rho


def softmax_jacobian_without_outer_product(row: Array) -> Array:
    """ρ_i (I − ρ_iᵗ) on a 1-D array, which .T leaves unchanged: ρ_k (δ_jk − ρ_k)."""
    return row * (np.eye(len(row)) - row.T)


def softmax_backward_without_outer_product(drho: Array, rho: Array) -> Array:
    """dρ times that Jacobian, per row: ρ_k (dρ_k − ρ_k Σ_j dρ_j)."""
    return rho * (drho - rho * drho.sum(axis=-1, keepdims=True))


def softmax_backward_without_the_sum(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ: nothing is subtracted."""
    return drho * rho


def softmax_backward_with_the_weights_twice(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ in place of dρ."""
    return softmax_backward(drho * rho, rho)


def softmax_backward_with_exchanged_arguments(drho: Array, rho: Array) -> Array:
    """[ρ − ~(ρ ⊖ dρ)] ∘ dρ."""
    return softmax_backward(rho, drho)


def key_gradient_transposed(draw: Array, q: Array) -> Array:
    """qᵗ dS: the transpose of the gradient, (d_k, n)."""
    return transposed(q) @ draw


def key_gradient_by_printed_jacobian(dz: Array, q: Array) -> Array:
    """dZ · ∂Z/∂K with "∂Z/∂K = Qᵗ": the shapes match only if n = d_k."""
    return dz @ transposed(q)


def value_gradient_without_transpose(rho: Array, dout: Array) -> Array:
    """ρ dO: a transpose that keeps the order of the axes."""
    return np.transpose(rho, range(rho.ndim)) @ dout


def _instead(softmax_backward: Callable[[Array, Array], Array]) -> Callable[..., dict[str, Piece]]:
    """Replaces only the gradient of softmax."""
    return lambda p: {
        "row_dots": lambda drho, rho: np.zeros(()),
        "dscores": lambda drho, rho, dots, scores, mask: softmax_backward(drho, rho),
    }


def _unscaled(q: Array, k: Array) -> Array:
    return q @ transposed(k)


def _overflowing(scores: Array, mask: Array | None) -> Array:
    weights = np.exp(scores if mask is None else np.where(mask, scores, -math.inf))
    return weights / weights.sum(axis=-1, keepdims=True)


def _mistake(
    name: str, explains: str, equation: str, fix: str, apply: Callable[..., dict], errata: str = ""
) -> Mistake:
    return Mistake(name, "attention", explains, equation, fix, apply, errata)


RIGHT_25 = "ds = (dρ − (dρ * ρ).sum(axis=-1, keepdims=True)) * ρ"

MISTAKES = (
    _mistake(
        "1/√d_k missing from the backward pass",
        "dq and dk are √d_k times too large: the gradient of the scaled scores is used as that of the unscaled ones.",
        "28",
        "divide the gradient of the scores by √d_k, the width of q and k, before the products with k and q",
        lambda p: {"draw": lambda dscores, q: dscores},
        "E42",
    ),
    _mistake(
        "1/√d_k missing from both passes",
        "The weights are softmax(q kᵗ), and the gradient of the scores is not scaled either.",
        "12",
        "divide the scores by √d_k before softmax, and their gradient by √d_k in the backward pass",
        lambda p: {"scores": _unscaled, "draw": lambda dscores, q: dscores},
        "E14",
    ),
    _mistake(
        "1/√d_k missing from the forward pass",
        "The weights are softmax(q kᵗ): the scores recomputed in the backward pass are not scaled.",
        "12",
        "divide the scores by √d_k before softmax",
        lambda p: {"scores": _unscaled},
        "E14",
    ),
    _mistake(
        "d_k in place of √d_k",
        "Scores and their gradient are divided by the width of q and k, not by its square root.",
        "12",
        "divide by √d_k in both passes",
        lambda p: {
            "scores": lambda q, k: _unscaled(q, k) / q.shape[-1],
            "draw": lambda dscores, q: dscores / q.shape[-1],
        },
        "E32",
    ),
    _mistake(
        "1/√d_k twice in the backward pass",
        "dq and dk are √d_k times too small: the gradient of the scores is divided by d_k, or by √d_k in two places.",
        "28",
        "divide by √d_k once",
        lambda p: {"draw": lambda dscores, q: dscores / q.shape[-1]},
    ),
    _mistake(
        "row sums broadcast along the wrong axis",
        "Σ_k dρ ρ was summed without keepdims, so it is subtracted from columns instead of rows.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_without_keepdims),
        "E6",
    ),
    _mistake(
        "the sum in the softmax gradient over queries",
        "Σ dρ ρ is taken over axis −2; softmax acts on each row of the scores separately.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_over_tokens),
        "E6, E36",
    ),
    _mistake(
        "an elementwise product in place of the row sum",
        "dρ ∘ ρ is subtracted entry by entry instead of its row sum.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_with_hadamard),
        "E7",
    ),
    _mistake(
        "the mean in place of the weighted sum",
        "dρ ∘ ρ − mean(dρ ∘ ρ): rows sum to 0, so the row-sum test (eq 26) passes, but it is not the gradient.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_minus_mean),
        "E34",
    ),
    _mistake(
        "matrix products in the gradient of softmax",
        "dρ ∘ ρ − ρ dρᵗ ρ mixes the rows; the sum in the second term must run within one row.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_matrix_products),
        "E35",
    ),
    _mistake(
        "softmax's Jacobian without its outer product",
        "diag(ρ) − ρᵗρ was built from 1-D arrays, which .T leaves unchanged: ρ_k (δ_jk − ρ_k).",
        "25",
        f"use np.outer, or do without the Jacobian: {RIGHT_25}",
        _instead(softmax_backward_without_outer_product),
        "E37",
    ),
    _mistake(
        "the sum missing from the gradient of softmax",
        "dρ ∘ ρ alone: the weights of a row depend on each other, since they sum to 1.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_without_the_sum),
    ),
    _mistake(
        "ρ multiplied into the gradient of ρ",
        "The gradient of ρ is multiplied by ρ before it enters the gradient of softmax, which has this factor already.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_with_the_weights_twice),
    ),
    _mistake(
        "ρ and its gradient exchanged in the gradient of softmax",
        "The weights are used as the gradient, and the gradient as the weights.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_with_exchanged_arguments),
    ),
    _mistake(
        "softmax left out of the backward pass",
        "The gradient of the weights, scaled, is used as the gradient of the scores.",
        "25",
        RIGHT_25,
        _instead(lambda drho, rho: drho),
    ),
    _mistake(
        "softmax and scale left out of the backward pass",
        "dq = dρ k and dk = dρᵗ q: the gradient of the weights is used as that of q kᵗ.",
        "25",
        f"{RIGHT_25}, then divide by √d_k",
        lambda p: {**_instead(lambda drho, rho: drho)(p), "draw": lambda dscores, q: dscores},
        "E41",
    ),
    _mistake(
        "dk transposed",
        "dk = qᵗ dS is the transpose of the gradient; its shape is correct only if n = d_k.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: key_gradient_transposed(draw, q)},
        "E38",
    ),
    _mistake(
        "dk = dS qᵗ",
        "q and dS are swapped and the wrong one is transposed; the shapes match only if n = d_k.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: key_gradient_by_printed_jacobian(draw, q)},
        "E43",
    ),
    _mistake(
        "dk without the transpose of dS",
        "dk = dS q: a key receives gradient from the queries that attend to it, which are a column of dS.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: draw @ q},
    ),
    _mistake(
        "dq with dS transposed",
        "dq = dSᵗ k: a query receives gradient from the keys it attends to, which are a row of dS.",
        "ATT.2",
        "dq = dS k",
        lambda p: {"dq": lambda draw, k, q: transposed(draw) @ k},
    ),
    _mistake(
        "dq from q in place of k",
        "dq = dS q: the derivative of q kᵗ with respect to q is k.",
        "ATT.2",
        "dq = dS k",
        lambda p: {"dq": lambda draw, k, q: draw @ q},
    ),
    _mistake(
        "dk from k in place of q",
        "dk = dSᵗ k: the derivative of q kᵗ with respect to k is q.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: transposed(draw) @ k},
    ),
    _mistake(
        "dv without the transpose of ρ",
        "dv = ρ dout: a value receives gradient from the tokens that attend to it, which are a column of ρ.",
        "ATT.1",
        "dv = ρᵗ dout; make sure that the transpose swaps the axes",
        lambda p: {"dv": value_gradient_without_transpose},
        "E39",
    ),
    _mistake(
        "softmax over queries",
        "The weights sum to 1 over columns, not rows: softmax was taken along axis −2.",
        "15",
        "softmax along the last axis, over the keys",
        lambda p: {
            "weights": lambda scores, mask: transposed(
                softmax(transposed(scores), None if mask is None else transposed(mask))
            )
        },
    ),
    _mistake(
        "softmax without subtracting the maximum",
        "exp overflows for scores above 709 (float64) or 88 (float32), and inf/inf is nan.",
        "15",
        "subtract the largest score of each row before exp; the result is the same",
        lambda p: {"weights": _overflowing},
        "E23",
    ),
)
