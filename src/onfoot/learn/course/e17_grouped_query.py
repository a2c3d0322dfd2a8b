"""Exercise 17: grouped queries. The page is e17_grouped_query.md; check with: onfoot learn check 17"""

import numpy as np
from e07_attention import attention_backward, attention_forward


def grouped(x, n_kv):
    """(B, H, T, D) -> (B, Hkv, G, T, D): the query heads in groups of G = H/Hkv. Given."""
    b, h, t, d = x.shape
    return x.reshape(b, n_kv, h // n_kv, t, d)


def joined(x):
    """(B, Hkv, G, T, D) -> (B, H, T, D). Given."""
    b, n_kv, g, t, d = x.shape
    return x.reshape(b, n_kv * g, t, d)


def grouped_query_forward(q, k, v, causal=True):
    """Query head h reads the keys and values of head h // G. Given: q (B, H, T, D), k, v (B, Hkv, T, D)."""
    n_kv = k.shape[1]
    shared = k[:, :, None], v[:, :, None]  # (B, Hkv, 1, T, D): NumPy repeats the axis of 1 for the group
    y, s_attention = attention_forward(grouped(q, n_kv), *shared, causal)
    return joined(y), (s_attention, n_kv)


def grouped_query_backward(dy, saved):
    """The gradients of q, k and v, from dy (B, H, T, D), the gradient of y. To write."""
    s_attention, n_kv = saved
    dq = None  # shape (B, H, T, D)
    dk = None  # shape (B, Hkv, T, D)
    dv = None  # shape (B, Hkv, T, D)
    return dq, dk, dv
