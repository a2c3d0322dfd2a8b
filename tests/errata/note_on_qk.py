"""The note on the gradients of Z = QKᵗ: its formulas, realised anew (E41 to E43).

q, k, v and dout are (batch, heads, tokens, width); the note has no mask.
"""

from __future__ import annotations

from errata.core import Array, t
from onfoot.ops.attention import attention_weights, softmax_backward


def through_weights_not_scores(
    q: Array, k: Array, v: Array, dout: Array, causal: bool = False
) -> tuple[Array, Array, Array]:
    """dQ = dA K and dK = dAᵗ Q: the gradient of the weights where that of the scores belongs (E41)."""
    da = dout @ t(v)
    return da @ k, t(da) @ q, t(attention_weights(q, k, causal)) @ dout


def without_scale(q: Array, k: Array, v: Array, dout: Array, causal: bool = False) -> tuple[Array, Array, Array]:
    """dQ = dS K and dK = dSᵗ Q with dS the gradient of the scaled scores: 1/√d_k is missing (E42)."""
    a = attention_weights(q, k, causal)
    ds = softmax_backward(dout @ t(v), a)
    return ds @ k, t(ds) @ q, t(a) @ dout


def key_gradient(dz: Array, q: Array) -> Array:
    """dZᵗ Q."""
    return t(dz) @ q
