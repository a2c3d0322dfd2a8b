"""The tangents of one head of self-attention with its six parameters."""

from __future__ import annotations

from collections.abc import Sequence

from onfoot.arrays import Array, namespace, rows
from onfoot.ops.attention import AttentionSaved, attention_backward
from onfoot.ops.attention_head import AttentionHeadSaved, Head
from onfoot.ops.tangents.attention import attention_backward_tangent, attention_tangent


def head_tangent(a_dot: Array, head_dot: Head, saved: AttentionHeadSaved) -> tuple[Array, AttentionHeadSaved]:
    """ẏ of one head, from the tangents of its input and of its six parameters."""
    a, head, q, k, v, rho = saved
    v_dot = a_dot @ head.w_v + a @ head_dot.w_v + head_dot.b_v  # eq HEAD.1
    q_dot = a_dot @ head.w_q + a @ head_dot.w_q + head_dot.b_q
    k_dot = a_dot @ head.w_k + a @ head_dot.w_k + head_dot.b_k
    y_dot, attended = attention_tangent(q_dot, k_dot, v_dot, AttentionSaved(q, k, v, rho, None))
    return y_dot, AttentionHeadSaved(a_dot, head_dot, q_dot, k_dot, v_dot, attended.rho)


def head_backward_tangent(
    dy: Array, dy_dot: Array, saved: AttentionHeadSaved, saved_dot: AttentionHeadSaved
) -> tuple[Array, Head]:
    """Tangents of the gradients of a and of the six parameters."""
    a, head, *_ = saved
    a_dot, head_dot, *_ = saved_dot
    inner, inner_dot = (AttentionSaved(s.q, s.k, s.v, s.rho, None) for s in (saved, saved_dot))
    grads = attention_backward(dy, inner)  # of q, k and v
    grads_dot = attention_backward_tangent(dy, dy_dot, inner, inner_dot)
    da_dot: Array = 0
    made = []
    for x, d, d_dot in zip("qkv", grads, grads_dot, strict=True):
        weight, weight_dot = getattr(head, f"w_{x}"), getattr(head_dot, f"w_{x}")
        da_dot = da_dot + d_dot @ weight.T + d @ weight_dot.T  # eq HEAD.2  (..., T, d)
        dweight_dot = rows(a_dot).T @ rows(d) + rows(a).T @ rows(d_dot)  # eq HEAD.3
        dbias_dot = rows(d_dot).sum(axis=0)
        made += [dweight_dot, namespace(a).zeros_like(dbias_dot) if x == "k" else dbias_dot]  # b_k has no effect
    return da_dot, Head(*made)


def heads_tangent(
    a_dot: Array, heads_dot: Sequence[Head], saved: list[AttentionHeadSaved]
) -> tuple[Array, list[AttentionHeadSaved]]:
    """The tangents of the heads' outputs, concatenated."""
    outputs, saved_dot = zip(*(head_tangent(a_dot, h, s) for h, s in zip(heads_dot, saved, strict=True)), strict=True)
    return namespace(a_dot).concatenate(outputs, axis=-1), list(saved_dot)


def heads_backward_tangent(
    dy: Array, dy_dot: Array, saved: list[AttentionHeadSaved], saved_dot: list[AttentionHeadSaved]
) -> tuple[Array, list[Head]]:
    """Tangents of the gradients of a and of each head's parameters."""
    da_dot: Array = 0
    made, column = [], 0
    for one, one_dot in zip(saved, saved_dot, strict=True):
        columns = slice(column, column := column + one.v.shape[-1])
        da_h, grads = head_backward_tangent(dy[..., columns], dy_dot[..., columns], one, one_dot)
        da_dot = da_dot + da_h
        made.append(grads)
    return da_dot, made
