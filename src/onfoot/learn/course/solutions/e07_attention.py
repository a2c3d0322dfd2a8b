"""Exercise 7: the mask. The page is e07_attention.md; check with: onfoot learn check 7"""

import numpy as np
from e03_cross_entropy import softmax_gradient
from e06_one_head import transposed


def visible(n_queries, n_keys):
    """Whether query i may see key j, (Tq, Tk): not a later one. The last query stands at the last key. Given."""
    return np.arange(n_keys) <= np.arange(n_queries)[:, None] + (n_keys - n_queries)


def masked_softmax(scores, mask):
    """Softmax in which masked entries have weight 0; a row without any visible key is all 0. Given."""
    scores = np.where(mask, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    top = np.where(top == -np.inf, np.zeros_like(top), top)
    weights = np.exp(scores - top)  # exp(−inf) is 0
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, np.ones_like(total), total)


def attention_forward(q, k, v, causal=True):
    """y = softmax(mask(q kᵗ/√D)) v. Given: q (..., Tq, D), k (..., Tk, D), v (..., Tk, Dv), y (..., Tq, Dv)."""
    scores = q @ transposed(k) / float(np.sqrt(q.shape[-1]))  # (..., Tq, Tk)
    n_queries, n_keys = scores.shape[-2:]
    mask = visible(n_queries, n_keys) if causal else np.ones((n_queries, n_keys), dtype=bool)
    rho = masked_softmax(scores, mask)
    return rho @ v, (q, k, v, rho)


def attention_backward(dy, saved):
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y."""
    q, k, v, rho = saved
    drho = dy @ transposed(v)  # (..., Tq, Tk)
    dv = transposed(rho) @ dy  # (..., Tk, Dv)
    dscores = softmax_gradient(drho, rho)  # 0 wherever rho is: the mask needs no step of its own
    draw = dscores / float(np.sqrt(q.shape[-1]))
    dq = draw @ k  # (..., Tq, D)
    dk = transposed(draw) @ q  # (..., Tk, D)
    return dq, dk, dv
