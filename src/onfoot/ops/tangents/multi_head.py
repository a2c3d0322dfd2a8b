"""The tangents of multi-head attention: those of its three linear layers and of attention."""

from __future__ import annotations

from onfoot.arrays import Array, namespace
from onfoot.ops.attention import attention_backward
from onfoot.ops.multi_head import MultiHeadSaved, merge_heads, split_heads
from onfoot.ops.tangents.attention import attention_backward_tangent, attention_tangent
from onfoot.ops.tangents.linear import linear_backward_tangent, linear_tangent


def multi_head_tangent(
    query_dot: Array,
    key_dot: Array,
    value_dot: Array,
    w_q_dot: Array | None,
    b_q_dot: Array | None,
    w_k_dot: Array | None,
    b_k_dot: Array | None,
    w_v_dot: Array | None,
    b_v_dot: Array | None,
    saved: MultiHeadSaved,
) -> tuple[Array, MultiHeadSaved]:
    """ẏ of every head, side by side."""
    n_head = saved.heads.q.shape[-3]
    q_dot, s_q_dot = linear_tangent(query_dot, w_q_dot, b_q_dot, saved.q)
    k_dot, s_k_dot = linear_tangent(key_dot, w_k_dot, b_k_dot, saved.k)
    v_dot, s_v_dot = linear_tangent(value_dot, w_v_dot, b_v_dot, saved.v)
    q_dot, k_dot, v_dot = (split_heads(x, n_head) for x in (q_dot, k_dot, v_dot))
    y_dot, s_heads_dot = attention_tangent(q_dot, k_dot, v_dot, saved.heads)  # eq MHA.5
    return merge_heads(y_dot), MultiHeadSaved(s_q_dot, s_k_dot, s_v_dot, s_heads_dot)


def multi_head_backward_tangent(
    dy: Array, dy_dot: Array, saved: MultiHeadSaved, saved_dot: MultiHeadSaved
) -> tuple[Array | None, ...]:
    """Tangents of the gradients of query, key, value, w_q, b_q, w_k, b_k, w_v and b_v."""
    dy, dy_dot = (split_heads(x, saved.heads.q.shape[-3]) for x in (dy, dy_dot))
    grads = attention_backward(dy, saved.heads)  # of q, k and v
    grads_dot = attention_backward_tangent(dy, dy_dot, saved.heads, saved_dot.heads)
    inputs, parameters = [], []
    for d, d_dot, s, s_dot in zip(grads, grads_dot, saved[:3], saved_dot[:3], strict=True):
        dx_dot, *rest = linear_backward_tangent(merge_heads(d), merge_heads(d_dot), s, s_dot)  # eq MHA.6
        inputs.append(dx_dot)
        parameters += rest
    dw_q, db_q, dw_k, db_k, dw_v, db_v = parameters
    if db_k is not None:
        db_k = namespace(dy).zeros_like(db_k)  # b_k has no effect
    return *inputs, dw_q, db_q, dw_k, db_k, dw_v, db_v
