"""Six typical wrong answers to e17_grouped_query: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "The gradients of keys and values are averaged over the query heads of the group instead of summed.",
        "gradients": ["dk", "dv"],
        "code": '''\
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
    dq, dk, dv = attention_backward(grouped(dy, n_kv), s_attention)
    dq = joined(dq)
    dk = dk.mean(axis=2)
    dv = dv.mean(axis=2)
    return dq, dk, dv
''',
    },
    {
        "mistake": "dv is taken from the first query head of each group only; the group's other heads are forgotten.",
        "gradients": ["dv"],
        "code": '''\
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
    g_q, g_k, g_v = attention_backward(grouped(dy, n_kv), s_attention)
    return joined(g_q), np.sum(g_k, axis=2), g_v[:, :, 0]
''',
    },
    {
        "mistake": "dk and dv are summed over the wrong axis: over the key/value heads instead of over the group.",
        "gradients": ["dk", "dv"],
        "code": '''\
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
    group_axis = 1
    dq, *shared = attention_backward(grouped(dy, n_kv), s_attention)
    dk, dv = (part.sum(axis=group_axis) for part in shared)
    dq = joined(dq)
    return dq, dk, dv
''',
    },
    {
        "mistake": "dy is grouped in the wrong order: query head h is put into group h % Hkv instead of h // G.",
        "gradients": ["dq", "dk", "dv"],
        "code": '''\
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
    b, h, t, d = dy.shape
    g = h // n_kv
    dy_grouped = dy.reshape(b, g, n_kv, t, d).swapaxes(1, 2)
    dq, dk, dv = attention_backward(dy_grouped, s_attention)
    dq = dq.reshape(b, h, t, d)
    dk = np.add.reduce(dk, axis=2)
    dv = np.add.reduce(dv, axis=2)
    return dq, dk, dv
''',
    },
    {
        "mistake": "dk is not summed over the group but joined like dq: it has H heads instead of Hkv.",
        "gradients": ["dk"],
        "code": '''\
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
    dq, dk, dv = attention_backward(grouped(dy, n_kv), s_attention)
    dq, dk, dv = joined(dq), joined(dk), dv.sum(axis=2)
    return dq, dk, dv
''',
    },
    {
        "mistake": (
            "The heads of dq come back in the wrong order: group and key/value head are swapped before they are joined."
        ),
        "gradients": ["dq"],
        "code": '''\
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
    dq, dk, dv = attention_backward(grouped(dy, n_kv), s_attention)
    dq = dq.swapaxes(1, 2).reshape(dy.shape)
    dk = np.einsum("bkgtd->bktd", dk)
    dv = np.einsum("bkgtd->bktd", dv)
    return dq, dk, dv
''',
    },
]
