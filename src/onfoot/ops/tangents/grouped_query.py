"""The tangents of grouped-query attention: those of attention, with the shared heads' axis of 1."""

from __future__ import annotations

from onfoot.arrays import Array
from onfoot.ops.grouped_query import GroupedQuerySaved, grouped, joined
from onfoot.ops.tangents.attention import attention_backward_tangent, attention_tangent


def grouped_query_tangent(
    q_dot: Array, k_dot: Array, v_dot: Array, saved: GroupedQuerySaved
) -> tuple[Array, GroupedQuerySaved]:
    """ẏ of each query head."""
    shared = k_dot[..., None, :, :], v_dot[..., None, :, :]
    y_dot, saved_dot = attention_tangent(grouped(q_dot, k_dot.shape[-3]), *shared, saved.shared)  # eq GQA.4
    return joined(y_dot), GroupedQuerySaved(saved_dot)


def grouped_query_backward_tangent(
    dy: Array, dy_dot: Array, saved: GroupedQuerySaved, saved_dot: GroupedQuerySaved
) -> tuple[Array, Array, Array]:
    """Tangents of the gradients of q, k and v; those of k and v are summed over the query heads that share them."""
    n_kv = saved.shared.k.shape[-4]
    dy, dy_dot = grouped(dy, n_kv), grouped(dy_dot, n_kv)
    dq_dot, dk_dot, dv_dot = attention_backward_tangent(dy, dy_dot, saved.shared, saved_dot.shared)
    return joined(dq_dot), dk_dot.sum(axis=-3), dv_dot.sum(axis=-3)  # eq GQA.5
