"""Exercise 8: several heads. The page is e08_multi_head.md; check with: onfoot learn check 8"""

import numpy as np
from e01_linear import linear_backward, linear_forward
from e07_attention import attention_backward, attention_forward


def split_heads(x, n_head):
    """(B, T, H D) -> (B, H, T, D): each head gets D columns of every token. Given."""
    b, t, width = x.shape
    return x.reshape(b, t, n_head, width // n_head).swapaxes(1, 2)


def merge_heads(x):
    """(B, H, T, D) -> (B, T, H D): the heads side by side. Given."""
    b, h, t, d = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * d)


def self_attention_forward(x, weight, bias, n_head):
    """Causal attention of H heads. Given: x (B, T, C), weight (C, 3 C), bias (3 C,), y (B, T, C)."""
    qkv, s_linear = linear_forward(x, weight, bias)  # (B, T, 3 C): the columns are q | k | v
    q, k, v = (split_heads(part, n_head) for part in np.split(qkv, 3, axis=-1))  # each (B, H, T, C/H)
    heads, s_attention = attention_forward(q, k, v)  # (B, H, T, C/H)
    return merge_heads(heads), (s_linear, s_attention, n_head)


def self_attention_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (B, T, C), the gradient of y. To write."""
    s_linear, s_attention, n_head = saved
    dx = None  # shape (B, T, C)
    dweight = None  # shape (C, 3 C)
    dbias = None  # shape (3 C,)
    return dx, dweight, dbias
