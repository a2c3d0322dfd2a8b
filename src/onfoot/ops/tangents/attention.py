"""The tangents of scaled dot-product attention and of its backward pass."""

from __future__ import annotations

import math

from onfoot.arrays import Array, namespace
from onfoot.ops.attention import AttentionSaved, softmax_backward


def softmax_tangent(scores_dot: Array, rho: Array) -> Array:
    """ρ̇ = ρ ∘ [ṡ − ~(ρ ⊖ ṡ)]: softmax's derivative is symmetric, so this is `softmax_backward`."""
    return softmax_backward(scores_dot, rho)  # eq ATT.4


def softmax_backward_tangent(drho: Array, drho_dot: Array, rho: Array, rho_dot: Array) -> Array:
    """The tangent of [dρ − ~(dρ ⊖ ρ)] ∘ ρ."""
    inner = drho - (drho * rho).sum(axis=-1, keepdims=True)
    inner_dot = drho_dot - (drho_dot * rho + drho * rho_dot).sum(axis=-1, keepdims=True)
    return inner_dot * rho + inner * rho_dot  # eq ATT.5


def attention_tangent(q_dot: Array, k_dot: Array, v_dot: Array, saved: AttentionSaved) -> tuple[Array, AttentionSaved]:
    """ẏ = ρ̇ v + ρ v̇. A masked weight is 0 and stays 0."""
    q, k, v, rho, keep = saved
    xp = namespace(q)
    raw_dot = q_dot @ xp.swapaxes(k, -1, -2) + q @ xp.swapaxes(k_dot, -1, -2)  # eq ATT.6  (..., Tq, Tk)
    rho_dot = softmax_tangent(raw_dot / math.sqrt(q.shape[-1]), rho)
    kept, kept_dot = (rho, rho_dot) if keep is None else (rho * keep, rho_dot * keep)
    y_dot = kept_dot @ v + kept @ v_dot  # eq ATT.7  (..., Tq, Dv)
    return y_dot, AttentionSaved(q_dot, k_dot, v_dot, rho_dot, None)


def attention_backward_tangent(
    dy: Array, dy_dot: Array, saved: AttentionSaved, saved_dot: AttentionSaved
) -> tuple[Array, Array, Array]:
    """Tangents of the gradients of q, k and v."""
    q, k, v, rho, keep = saved
    q_dot, k_dot, v_dot, rho_dot, _ = saved_dot
    xp, root = namespace(q), math.sqrt(q.shape[-1])

    def t(x: Array) -> Array:
        return xp.swapaxes(x, -1, -2)

    drho = dy @ t(v)  # (..., Tq, Tk)
    drho_dot = dy_dot @ t(v) + dy @ t(v_dot)
    kept, kept_dot = rho, rho_dot
    if keep is not None:
        drho, drho_dot, kept, kept_dot = drho * keep, drho_dot * keep, rho * keep, rho_dot * keep
    dv_dot = t(kept_dot) @ dy + t(kept) @ dy_dot  # eq ATT.8  (..., Tk, Dv)
    draw = softmax_backward(drho, rho) / root
    draw_dot = softmax_backward_tangent(drho, drho_dot, rho, rho_dot) / root
    dq_dot = draw_dot @ k + draw @ k_dot  # eq ATT.9  (..., Tq, Dk)
    dk_dot = t(draw_dot) @ q + t(draw) @ q_dot  # eq ATT.10  (..., Tk, Dk)
    return dq_dot, dk_dot, dv_dot
