"""The note with NumPy listings for self-attention: its formulas, realised anew (E33 to E40).

q, k, v and dout are (batch, heads, tokens, width), as in the note's own arrays; it has no mask.
"""

from __future__ import annotations

import math

import numpy as np

from errata.core import Array, core_with, t
from onfoot.check.mistakes.attention import (
    key_gradient_transposed,
    softmax_backward_matrix_products,
    softmax_backward_minus_mean,
    softmax_backward_over_tokens,
    value_gradient_without_transpose,
)
from onfoot.ops.attention import attention_weights, softmax_backward
from onfoot.ops.multi_head import merge_heads, split_heads

# E34 to E37: four ways to the gradient of the scores


def softmax_jacobian(row: Array) -> Array:
    """diag(A_i) − A_iᵗ A_i, with the outer product of the row with itself."""
    return np.diag(row) - np.outer(row, row)


minus_mean = core_with(softmax_backward_minus_mean)
matrix_products = core_with(softmax_backward_matrix_products)
row_index = core_with(softmax_backward_over_tokens)  # Σ_i A_i dA_i with i the row, as A_i is in the rest of the note


# E38, E39: transposes


def keys_transposed(q: Array, k: Array, v: Array, dout: Array, causal: bool = False) -> tuple[Array, Array, Array]:
    """Attention's backward pass with that dK; its shape is right only where n = d_k."""
    a = attention_weights(q, k, causal)
    draw = softmax_backward(dout @ t(v), a) / math.sqrt(q.shape[-1])
    return draw @ k, key_gradient_transposed(draw, q), t(a) @ dout


# E33, E40: the whole layer


def layer_backward(
    dout: Array, query: Array, key: Array, value: Array, weights: tuple[Array, Array, Array], n_head: int
) -> tuple[list[Array], list[Array]]:
    """The gradients of the three weights and of the three inputs, with the note's dS and dV."""
    inputs = (query, key, value)
    q, k, v = (split_heads(x @ w, n_head) for x, w in zip(inputs, weights, strict=True))
    do = split_heads(dout, n_head)
    dq, dk, _ = minus_mean(q, k, v, do, causal=False)
    dv = value_gradient_without_transpose(attention_weights(q, k, causal=False), do)
    merged = [merge_heads(d) for d in (dq, dk, dv)]
    dweights = [np.einsum("btc,btf->cf", x, d) for x, d in zip(inputs, merged, strict=True)]
    return dweights, [d @ w.T for d, w in zip(merged, weights, strict=True)]


def split_heads_unchecked(x: Array, n_head: int) -> Array:
    """Heads of width ⌊d/H⌋, the number of tokens left to reshape: it takes a width that the heads do not divide."""
    return np.swapaxes(x.reshape(len(x), -1, n_head, x.shape[-1] // n_head), 1, 2)
