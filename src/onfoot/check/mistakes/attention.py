"""What goes wrong in attention: the scale, the gradient of softmax, the products, the softmax itself.

The wrong formulas for the gradient of softmax map (dρ, ρ), the gradient of the weights and the weights, to the gradient
of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onfoot.check.layer import Array, Mistake, Piece, transposed
from onfoot.ops.attention import softmax


def softmax_backward_without_keepdims(drho: Array, rho: Array) -> Array:
    """The row sums of a square matrix, broadcast as NumPy broadcasts a vector: along the wrong axis."""
    return (drho - (drho * rho).sum(axis=-1)[..., None, :]) * rho


def softmax_backward_over_tokens(drho: Array, rho: Array) -> Array:
    """The sums taken down the columns."""
    return (drho - (drho * rho).sum(axis=-2, keepdims=True)) * rho


def softmax_backward_with_hadamard(drho: Array, rho: Array) -> Array:
    """[dρ − dρ ∘ ρ] ∘ ρ: nothing is summed."""
    return (drho - drho * rho) * rho


def softmax_backward_minus_mean(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ − mean(dρ ∘ ρ) of each row: its rows sum to 0, yet it is not the gradient."""
    ds = drho * rho
    return ds - ds.mean(axis=-1, keepdims=True)


def softmax_backward_matrix_products(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ − ρ dρᵗ ρ, the last term as two matrix products."""
    return drho * rho - rho @ transposed(drho) @ rho


def softmax_jacobian_without_outer_product(row: Array) -> Array:
    """ρ_i (I − ρ_iᵗ) on a one-dimensional array, whose transpose is itself: ρ_k (δ_jk − ρ_k)."""
    return row * (np.eye(len(row)) - row.T)


def softmax_backward_without_outer_product(drho: Array, rho: Array) -> Array:
    """dρ times that Jacobian, row by row: ρ_k (dρ_k − ρ_k Σ_j dρ_j)."""
    return rho * (drho - rho * drho.sum(axis=-1, keepdims=True))


def softmax_backward_without_the_sum(drho: Array, rho: Array) -> Array:
    """dρ ∘ ρ: nothing is subtracted."""
    return drho * rho


def key_gradient_transposed(draw: Array, q: Array) -> Array:
    """qᵗ dS: the transpose of the gradient, (d_k, n)."""
    return transposed(q) @ draw


def key_gradient_by_printed_jacobian(dz: Array, q: Array) -> Array:
    """dZ · ∂Z/∂K with "∂Z/∂K = Qᵗ": the shapes fit only where n = d_k."""
    return dz @ transposed(q)


def value_gradient_without_transpose(rho: Array, dout: Array) -> Array:
    """ρ dO: the axes "transposed" into the order they had."""
    return np.transpose(rho, range(rho.ndim)) @ dout


def _instead(softmax_backward: Callable[[Array, Array], Array]) -> Callable[..., dict[str, Piece]]:
    """The right pass in all but the given gradient of softmax."""
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
        "dq and dk are √d_k times too large: the gradient of the scaled scores is used as that of the raw ones.",
        "28",
        "divide the gradient of the scores by √d_k, the width of q and k, before the products with k and q",
        lambda p: {"draw": lambda dscores, q: dscores},
        "E42",
    ),
    _mistake(
        "1/√d_k missing from both passes",
        "The weights are softmax(q kᵗ), and the gradient of the scores is not scaled either.",
        "12",
        "divide the scores by √d_k before softmax, and their gradient by √d_k behind it",
        lambda p: {"scores": _unscaled, "draw": lambda dscores, q: dscores},
        "E14",
    ),
    _mistake(
        "1/√d_k missing from the forward pass",
        "The weights are softmax(q kᵗ): the scores that the backward pass computes again are not scaled.",
        "12",
        "divide the scores by √d_k before softmax",
        lambda p: {"scores": _unscaled},
        "E14",
    ),
    _mistake(
        "d_k in place of √d_k",
        "Scores and their gradient are divided by the width of q and k, not by its root.",
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
        "Σ_k dρ ρ has lost its axis (no keepdims), so that it is subtracted from columns and not from rows.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_without_keepdims),
        "E6",
    ),
    _mistake(
        "the sum of softmax's gradient over queries",
        "Σ dρ ρ is taken down the columns (axis −2); each row of the scores has a softmax of its own.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_over_tokens),
        "E6, E36",
    ),
    _mistake(
        "an elementwise product in place of the row sum",
        "dρ ∘ ρ is subtracted entry by entry where its sum over the row belongs.",
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
        "dρ ∘ ρ − ρ dρᵗ ρ mixes the rows; the sum in the second term belongs to one row.",
        "25",
        RIGHT_25,
        _instead(softmax_backward_matrix_products),
        "E35",
    ),
    _mistake(
        "softmax's Jacobian without its outer product",
        "diag(ρ) − ρᵗρ was built from one-dimensional arrays, whose transpose is themselves: ρ_k (δ_jk − ρ_k).",
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
        "dk = qᵗ dS is the transpose of the answer; its shape is right only where n = d_k.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: key_gradient_transposed(draw, q)},
        "E38",
    ),
    _mistake(
        "dk = dS qᵗ",
        "q and dS have changed sides and the wrong one is transposed; the shapes fit only where n = d_k.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: key_gradient_by_printed_jacobian(draw, q)},
        "E43",
    ),
    _mistake(
        "dk without the transpose of dS",
        "dk = dS q: a key collects from the queries that saw it, and those stand in a column of dS.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: draw @ q},
    ),
    _mistake(
        "dq with dS transposed",
        "dq = dSᵗ k: a query collects from the keys that it saw, and those stand in a row of dS.",
        "ATT.2",
        "dq = dS k",
        lambda p: {"dq": lambda draw, k, q: transposed(draw) @ k},
    ),
    _mistake(
        "dq from q in place of k",
        "dq = dS q: the derivative of q kᵗ by q is k.",
        "ATT.2",
        "dq = dS k",
        lambda p: {"dq": lambda draw, k, q: draw @ q},
    ),
    _mistake(
        "dk from k in place of q",
        "dk = dSᵗ k: the derivative of q kᵗ by k is q.",
        "ATT.3",
        "dk = dSᵗ q",
        lambda p: {"dk": lambda draw, q, k: transposed(draw) @ k},
    ),
    _mistake(
        "dv without the transpose of ρ",
        "dv = ρ dout: a value collects from the tokens that looked at it, and those stand in a column of ρ.",
        "ATT.1",
        "dv = ρᵗ dout; mind a transpose that leaves the axes in their order",
        lambda p: {"dv": value_gradient_without_transpose},
        "E39",
    ),
    _mistake(
        "softmax over queries",
        "The weights of a column sum to 1, not those of a row: softmax was taken along axis −2.",
        "15",
        "softmax along the last axis, over the keys that a query sees",
        lambda p: {
            "weights": lambda scores, mask: transposed(
                softmax(transposed(scores), None if mask is None else transposed(mask))
            )
        },
    ),
    _mistake(
        "softmax without its maximum taken off",
        "exp overflows for scores above 709 (float64) or 88 (float32), and inf/inf is nan.",
        "15",
        "subtract the largest score of a row before exp; it changes nothing else",
        lambda p: {"weights": _overflowing},
        "E23",
    ),
)
