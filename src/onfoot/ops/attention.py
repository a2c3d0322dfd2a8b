"""Scaled dot-product attention on q, k and v.

Shapes: q (..., Tq, Dk), k (..., Tk, Dk), v (..., Tk, Dv). Leading axes (batch, heads) are free; Tq ≠ Tk is
cross-attention or a chunk of queries behind cached keys; Dk is the paper's d_ρ, Dv its d_h, and they may differ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from onfoot.arrays import Array, arange, namespace


class AttentionSaved(NamedTuple):
    q: Array
    k: Array
    v: Array
    rho: Array  # (..., Tq, Tk)
    keep: Array | None


def visible(n_q: int, n_k: int, causal: bool, start: Array | None, like: Array) -> Array | None:
    """The attention mask: which keys each query may attend to, booleans (..., Tq, Tk), or None if all.

    The last query is aligned with the last key, so query i attends to the keys up to i + (Tk − Tq). `start` (..., Tq)
    is the first key that each query may attend to, as in packed examples and left padding.
    """
    keys = arange(n_k, like)
    mask = None
    if causal:
        mask = keys <= arange(n_q, like)[:, None] + (n_k - n_q)
    if start is not None:
        begun = keys >= start[..., None]
        mask = begun if mask is None else mask & begun
    return mask


def softmax(scores: Array, mask: Array | None = None) -> Array:
    """exp(s) over its sum, per row; masked entries have weight 0, and a fully masked row is all 0."""
    xp = namespace(scores)
    if mask is not None:
        scores = xp.where(mask, scores, -math.inf)  # −inf, not a product with 0: exp(0) would be 1
    top = xp.amax(scores, axis=-1, keepdims=True)
    top = xp.where(top == -math.inf, xp.zeros_like(top), top)
    weights = xp.exp(scores - top)  # at most 1, whatever the scores
    total = weights.sum(axis=-1, keepdims=True)
    return weights / xp.where(total == 0, xp.ones_like(total), total)


def softmax_backward(drho: Array, rho: Array) -> Array:
    """The gradient of the scores: [dρ − ~(dρ ⊖ ρ)] ∘ ρ. Its rows sum to 0, and it is 0 wherever ρ is."""
    return (drho - (drho * rho).sum(axis=-1, keepdims=True)) * rho  # eq 25, 26


def attention_weights(q: Array, k: Array, causal: bool = True, start: Array | None = None) -> Array:
    """ρ = softmax(mask(q kᵗ/√d_ρ)), (..., Tq, Tk)."""
    xp = namespace(q)
    raw = q @ xp.swapaxes(k, -1, -2)  # eq 10  (..., Tq, Tk)
    scaled = raw / math.sqrt(q.shape[-1])  # eq 12
    mask = visible(q.shape[-2], k.shape[-2], causal, start, q)
    return softmax(scaled, mask)  # eq 13, 15


def attention_forward(
    q: Array, k: Array, v: Array, causal: bool = True, start: Array | None = None, keep: Array | None = None
) -> tuple[Array, AttentionSaved]:
    """y = ρ v, each token's weighted average of the values it may attend to. `keep` is a dropout pattern for ρ."""
    rho = attention_weights(q, k, causal, start)
    y = (rho if keep is None else rho * keep) @ v  # eq 16, 18  (..., Tq, Dv)
    return y, AttentionSaved(q, k, v, rho, keep)


def attention_backward(dy: Array, saved: AttentionSaved) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v."""
    q, k, v, rho, keep = saved
    xp = namespace(q)
    drho = dy @ xp.swapaxes(v, -1, -2)  # (..., Tq, Tk)
    if keep is not None:
        drho, kept = drho * keep, rho * keep
    else:
        kept = rho
    dv = xp.swapaxes(kept, -1, -2) @ dy  # eq ATT.1  ρᵗ Δ, (..., Tk, Dv)
    dscaled = softmax_backward(drho, rho)  # eq 25, 27: ρ already includes the mask
    draw = dscaled / math.sqrt(q.shape[-1])  # eq 28
    dq = draw @ k  # eq ATT.2  (..., Tq, Dk)
    dk = xp.swapaxes(draw, -1, -2) @ q  # eq ATT.3  (..., Tk, Dk)
    return dq, dk, dv
