"""Multi-head attention with its projections: queries, keys and values may come from different inputs.

Shapes: query (..., Tq, Cq), key (..., Tk, Ck), value (..., Tk, Cv); w_q (Cq, H Dk), w_k (Ck, H Dk), w_v (Cv, H Dv), the
heads side by side. In self-attention the three inputs are the same array, and its gradient is the sum of the three. The
output projection that usually follows is a linear layer.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, namespace
from onfoot.ops.attention import AttentionSaved, attention_backward, attention_forward
from onfoot.ops.linear import LinearSaved, linear_backward, linear_forward


class MultiHeadSaved(NamedTuple):
    q: LinearSaved
    k: LinearSaved
    v: LinearSaved
    heads: AttentionSaved  # q (..., H, Tq, Dk), k (..., H, Tk, Dk), v (..., H, Tk, Dv)


def split_heads(x: Array, n_head: int) -> Array:
    """(..., T, H D) -> (..., H, T, D). The transpose matters: a reshape alone would mix tokens and features."""
    return x.reshape(*x.shape[:-1], n_head, x.shape[-1] // n_head).swapaxes(-2, -3)


def merge_heads(x: Array) -> Array:
    """(..., H, T, D) -> (..., T, H D): the heads' features side by side."""
    *lead, h, t, d = x.shape
    return x.swapaxes(-2, -3).reshape(*lead, t, h * d)


def multi_head_forward(
    query: Array,
    key: Array,
    value: Array,
    w_q: Array,
    b_q: Array | None,
    w_k: Array,
    b_k: Array | None,
    w_v: Array,
    b_v: Array | None,
    n_head: int,
    causal: bool = True,
) -> tuple[Array, MultiHeadSaved]:
    """y = ρ v of every head, side by side: (..., Tq, H Dv). Causal masks need at least as many keys as queries."""
    _check(query, key, value, w_q, w_k, w_v, n_head, causal)
    q, s_q = linear_forward(query, w_q, b_q)  # eq MHA.1  (..., Tq, H Dk)
    k, s_k = linear_forward(key, w_k, b_k)  # eq MHA.1  (..., Tk, H Dk)
    v, s_v = linear_forward(value, w_v, b_v)  # eq MHA.1  (..., Tk, H Dv)
    q, k, v = (split_heads(x, n_head) for x in (q, k, v))  # (..., H, T, D)
    y, s_heads = attention_forward(q, k, v, causal)  # eq MHA.2
    return merge_heads(y), MultiHeadSaved(s_q, s_k, s_v, s_heads)  # eq 34


def multi_head_backward(dy: Array, saved: MultiHeadSaved) -> tuple[Array | None, ...]:
    """Gradients of query, key, value, w_q, b_q, w_k, b_k, w_v and b_v (None where there is no bias)."""
    n_head = saved.heads.q.shape[-3]
    dq, dk, dv = attention_backward(split_heads(dy, n_head), saved.heads)  # eq MHA.3
    dquery, dw_q, db_q = linear_backward(merge_heads(dq), saved.q)  # eq MHA.4
    dkey, dw_k, db_k = linear_backward(merge_heads(dk), saved.k)  # eq MHA.4
    dvalue, dw_v, db_v = linear_backward(merge_heads(dv), saved.v)  # eq MHA.4
    if db_k is not None:
        db_k = namespace(dy).zeros_like(db_k)  # eq 32.b: exactly 0, not the rounding noise of the sum
    return dquery, dkey, dvalue, dw_q, db_q, dw_k, db_k, dw_v, db_v


def _check(
    query: Array, key: Array, value: Array, w_q: Array, w_k: Array, w_v: Array, n_head: int, causal: bool
) -> None:
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"keys and values must be of the same tokens, got {key.shape[-2]} and {value.shape[-2]}")
    if causal and query.shape[-2] > key.shape[-2]:
        raise ValueError(
            f"a causal mask needs at least as many keys as queries, got {key.shape[-2]} and {query.shape[-2]}; "
            "causal=False lets every query attend to every key"
        )
    if w_q.shape[-1] != w_k.shape[-1]:
        raise ValueError(f"queries and keys must have the same width, got {w_q.shape[-1]} and {w_k.shape[-1]}")
    for name, weight in (("w_q", w_q), ("w_v", w_v)):
        if weight.shape[-1] % n_head:
            raise ValueError(f"the columns of {name} must be a multiple of n_head={n_head}, got {weight.shape[-1]}")
