"""Attention: the paper's formulas as printed, and the traps beside them (E1 to E19).

q, k, v and dout are (batch, heads, tokens, width); a is (tokens, features).
"""

from __future__ import annotations

import math

import numpy as np

from errata.core import Array, core_with, scaled_scores, t
from onfoot.check.mistakes import mask
from onfoot.check.mistakes.attention import (
    softmax_backward_over_tokens,
    softmax_backward_with_hadamard,
    softmax_backward_without_keepdims,
)
from onfoot.ops import attention_backward, attention_forward
from onfoot.ops.attention import attention_weights, softmax


def lower(n: int) -> Array:
    """The paper's m: 1 on and below the diagonal, 0 above."""
    return np.tril(np.ones((n, n)))


# E1, E2: the mask as a Hadamard product before softmax


def weights_masked_by_product(q: Array, k: Array) -> Array:
    """ρ = softmax(m ∘ q kᵗ/√d_ρ)."""
    return mask.weights_masked_by_product(scaled_scores(q, k), lower(q.shape[-2]))


def attention_masked_by_product(q: Array, k: Array, v: Array) -> Array:
    return weights_masked_by_product(q, k) @ v


def masked_by_product_backward(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array]:
    """The backward pass printed for that forward pass: Δ_scaled = Δ_causal, as if ρ held the mask."""
    rho = weights_masked_by_product(q, k)
    draw = _softmax_backward(dout @ t(v), rho) / math.sqrt(q.shape[-1])
    return draw @ k, t(draw) @ q, t(rho) @ dout


def masked_by_product_backward_with_the_mask(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array]:
    """What that forward pass would need: Δ_scaled = m ∘ Δ_causal."""
    rho = weights_masked_by_product(q, k)
    draw = lower(q.shape[-2]) * _softmax_backward(dout @ t(v), rho) / math.sqrt(q.shape[-1])
    return draw @ k, t(draw) @ q, t(rho) @ dout


def _softmax_backward(drho: Array, rho: Array) -> Array:
    return (drho - (drho * rho).sum(axis=-1, keepdims=True)) * rho


# E3, E4: other ways to mask


def attention_masked_after_softmax(q: Array, k: Array, v: Array) -> Array:
    """y = (m ∘ softmax(q kᵗ/√d_ρ)) v."""
    return mask.weights_masked_after_softmax(scaled_scores(q, k), lower(q.shape[-2])) @ v


def value_bias_gradient(dout: Array) -> Array:
    """∂b_v = Σ_tokens Δ (eq 24), which needs the rows of ρ to sum to 1 (E3, E11)."""
    return dout.sum(axis=-2)


# E6, E7, E10: the gradient of softmax, (25)


def softmax_backward_of_pairs(drho: Array, rho: Array) -> Array:
    """Each weight a function of its own score alone, as if a row had no sum."""
    return drho * rho * (1 - rho)


without_keepdims = core_with(softmax_backward_without_keepdims)
over_tokens = core_with(softmax_backward_over_tokens)
with_hadamard = core_with(softmax_backward_with_hadamard)


# E9: two layers in one formula, (20)


def two_layers_elementwise_square(rho_2: Array, rho_1: Array, a: Array, w_v: Array) -> Array:
    return rho_2 @ rho_1 @ a @ (w_v**2)


def two_layers_matrix_square(rho_2: Array, rho_1: Array, a: Array, w_v: Array) -> Array:
    """ρ^(i) ρ^(i−1) a w_v²: right where both layers have the same w_v."""
    return rho_2 @ rho_1 @ a @ (w_v @ w_v)


def two_layers(rho_2: Array, rho_1: Array, a: Array, w_1: Array, w_2: Array) -> Array:
    """ρ^(i) ρ^(i−1) a w^(i−1) w^(i): the first layer's weights come first."""
    return rho_2 @ rho_1 @ a @ w_1 @ w_2


# E13: the gradient of the keys' bias, (29), summed up although it vanishes


def key_bias_gradient_summed(q: Array, k: Array, v: Array, dout: Array) -> Array:
    """Σ_tokens Δ_rawᵗ q: 0 in mathematics, noise in floating point."""
    _, dk, _ = attention_backward(dout, attention_forward(q, k, v)[1])
    return dk.sum(axis=-2)


# E14 to E16: the KV cache


def cached_weights_without_scale(q_next: Array, k: Array) -> Array:
    """softmax(q_next kᵗ), as printed: no 1/√d_ρ."""
    return softmax(q_next @ t(k))


def cached_output_with_a_row_for_each_token(q_next: Array, k: Array, v: Array) -> Array:
    """y(t_next) in R^{(n_T+1)×d_h}, as printed: each value times its weight, and no sum."""
    return t(attention_weights(q_next, k)) * v


def chunk_without_offset(q: Array, k: Array, v: Array) -> Array:
    """The last queries against all keys, under the mask of a sequence that begins with them."""
    mask = np.arange(k.shape[-2]) <= np.arange(q.shape[-2])[:, None]
    return softmax(scaled_scores(q, k), mask) @ v


# E17, E18


def delta_q(a: Array, w_q: Array, w_k: Array, v: Array, dout: Array) -> Array:
    """Δ_q = Δ_raw k w_qᵗ (30): named after q, but a gradient of a."""
    dq, _, _ = attention_backward(dout, attention_forward(a @ w_q, a @ w_k, v)[1])
    return dq @ w_q.T


def weights_of_queries_alone(q: Array) -> Array:
    """softmax(q qᵗ/√d_ρ), without a mask: symmetric before softmax only."""
    return attention_weights(q, q, causal=False)
