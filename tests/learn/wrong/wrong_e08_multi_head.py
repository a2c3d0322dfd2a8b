"""Typical wrong answers to e08_multi_head, one mistake each."""

WRONG = [
    {
        "mistake": "dy is cut into heads by a plain reshape, without the swap of tokens and heads.",
        "gradients": ["dx", "dweight", "dbias"],
        "code": '''\
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
    b, t, c = dy.shape
    dheads = dy.reshape(b, n_head, t, c // n_head)
    dq, dk, dv = attention_backward(dheads, s_attention)
    dqkv = np.concatenate([merge_heads(dq), merge_heads(dk), merge_heads(dv)], axis=-1)
    dx, dweight, dbias = linear_backward(dqkv, s_linear)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": (
            "The gradients of the heads are put together by a plain reshape, without swapping heads and tokens back."
        ),
        "gradients": ["dx", "dweight", "dbias"],
        "code": '''\
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
    dqkv = attention_backward(split_heads(dy, n_head), s_attention)
    dqkv = np.concatenate([part.reshape(dy.shape) for part in dqkv], axis=-1)
    dx, dweight, dbias = linear_backward(dqkv, s_linear)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "The three parts are put together in the wrong order: k | q | v instead of q | k | v.",
        "gradients": ["dx", "dweight", "dbias"],
        "code": '''\
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
    dq, dk, dv = attention_backward(split_heads(dy, n_head), s_attention)
    dqkv = np.concatenate((merge_heads(dk), merge_heads(dq), merge_heads(dv)), axis=2)
    return linear_backward(dqkv, s_linear)
''',
    },
    {
        "mistake": (
            "dx is assigned (=) instead of added up (+=) over queries, keys and values: only the values' way is left."
        ),
        "gradients": ["dx"],
        "code": '''\
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
    x, weight, has_bias = s_linear
    dparts = attention_backward(split_heads(dy, n_head), s_attention)
    dweights, dbiases = [], []
    for dpart, part in zip(dparts, np.split(weight, 3, axis=1)):
        dx, dw, db = linear_backward(merge_heads(dpart), (x, part, has_bias))
        dweights.append(dw)
        dbiases.append(db)
    dweight = np.concatenate(dweights, axis=1)
    dbias = np.concatenate(dbiases)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "The whole gradient of the keys is set to 0, not only that of their bias.",
        "gradients": ["dx", "dweight"],
        "code": '''\
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
    c = dy.shape[-1]
    grads = attention_backward(split_heads(dy, n_head), s_attention)
    dqkv = np.concatenate([merge_heads(g) for g in grads], axis=-1)
    dqkv[..., c : 2 * c] = 0  # the key bias never learns anything
    dx, dweight, dbias = linear_backward(dqkv, s_linear)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": (
            "The columns of dq, dk and dv are interleaved (q0 k0 v0 q1 …) instead of standing side by side, q | k | v."
        ),
        "gradients": ["dx", "dweight", "dbias"],
        "code": '''\
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
    b, t, c = dy.shape
    dq, dk, dv = map(merge_heads, attention_backward(split_heads(dy, n_head), s_attention))
    dqkv = np.stack([dq, dk, dv], axis=-1).reshape(b, t, 3 * c)
    dx, dweight, dbias = linear_backward(dqkv, s_linear)
    return dx, dweight, dbias
''',
    },
]
