"""Typical wrong answers to e07_attention, one mistake each."""

WRONG = [
    {
        "mistake": "rho is computed again in the backward pass, and the mask is forgotten there.",
        "gradients": ["dq", "dk", "dv"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, _ = saved
    scale = 1 / float(np.sqrt(q.shape[-1]))
    raw = q @ transposed(k) * scale
    e = np.exp(raw - raw.max(axis=-1, keepdims=True))
    rho = e / e.sum(axis=-1, keepdims=True)
    dv = transposed(rho) @ dy
    draw = softmax_gradient(dy @ transposed(v), rho) * scale
    dq = draw @ k
    dk = transposed(draw) @ q
    return dq, dk, dv
''',
    },
    {
        "mistake": "The gradient of masked scores is set to −∞, as the scores were in the forward pass, instead of 0.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    dv = transposed(rho) @ dy
    drho = dy @ transposed(v)
    dscores = softmax_gradient(drho, rho)
    dscores = np.where(rho == 0, -np.inf, dscores)
    draw = dscores / float(np.sqrt(q.shape[-1]))
    dq = draw @ k
    dk = transposed(draw) @ q
    return dq, dk, dv
''',
    },
    {
        "mistake": "The mask of the backward pass leaves out the diagonal: a query's own key is treated as masked.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    n_q, n_k = rho.shape[-2:]
    mask = np.arange(n_k) < np.arange(n_q)[:, None] + (n_k - n_q)
    dscores = softmax_gradient(dy @ transposed(v), rho) * mask
    draw = dscores / float(np.sqrt(q.shape[-1]))
    dq = draw @ k
    dk = transposed(draw) @ q
    dv = transposed(rho) @ dy
    return dq, dk, dv
''',
    },
    {
        "mistake": "The gradient is masked with a triangle even if the forward pass had no mask (causal=False).",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    mask = visible(rho.shape[-2], rho.shape[-1])
    drho = np.einsum("...id,...jd->...ij", dy, v)
    dscores = np.where(mask, softmax_gradient(drho, rho), 0)
    draw = dscores / q.shape[-1] ** 0.5
    dq = np.einsum("...ij,...jc->...ic", draw, k)
    dk = np.einsum("...ij,...ic->...jc", draw, q)
    dv = np.einsum("...ij,...id->...jd", rho, dy)
    return dq, dk, dv
''',
    },
    {
        "mistake": "drho is multiplied by rho as a mask before softmax_gradient, so rho comes in twice.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    dv = transposed(rho) @ dy
    drho = (dy @ transposed(v)) * rho
    draw = softmax_gradient(drho, rho) / float(np.sqrt(q.shape[-1]))
    dq = draw @ k
    dk = transposed(draw) @ q
    return dq, dk, dv
''',
    },
    {
        "mistake": "The scale is 1/D instead of 1/√D: the root is forgotten.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    scale = 1.0 / q.shape[-1]
    drho = dy @ transposed(v)
    dscores = softmax_gradient(drho, rho)
    dq = (dscores @ k) * scale
    dk = (transposed(dscores) @ q) * scale
    dv = transposed(rho) @ dy
    return dq, dk, dv
''',
    },
]
