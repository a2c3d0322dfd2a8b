"""One head of self-attention with its six parameters, equation by equation as in the paper's Table 1.

Heads are independent, so each may have its own widths d_ρ and d_h; `heads` concatenates them. Heads of equal widths,
batched in one product, are `ops/multi_head.py`; this is the form to read first. Leading axes of `a` are free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from onfoot.arrays import Array, namespace
from onfoot.ops.attention import attention_weights, softmax_backward


class Head(NamedTuple):
    """The parameters of one head, or their gradients."""

    w_q: Array  # (d, d_ρ)
    b_q: Array  # (d_ρ,)
    w_k: Array  # (d, d_ρ)
    b_k: Array  # (d_ρ,)
    w_v: Array  # (d, d_h)
    b_v: Array  # (d_h,)


class AttentionHeadSaved(NamedTuple):
    a: Array
    head: Head
    q: Array
    k: Array
    v: Array
    rho: Array


def head_forward(a: Array, head: Head, causal: bool = True) -> tuple[Array, AttentionHeadSaved]:
    """a^h = ρ v: from a (..., T, d) to (..., T, d_h)."""
    v = a @ head.w_v + head.b_v  # eq 4  (..., T, d_h)
    q = a @ head.w_q + head.b_q  # eq 9.a  (..., T, d_ρ)
    k = a @ head.w_k + head.b_k  # eq 9.b  (..., T, d_ρ)
    rho = attention_weights(q, k, causal)  # eq 10, 12, 13, 15  (..., T, T)
    return rho @ v, AttentionHeadSaved(a, head, q, k, v, rho)  # eq 16


def head_backward(dy: Array, saved: AttentionHeadSaved) -> tuple[Array, Head]:
    """The gradients of a and of the six parameters."""
    a, head, q, k, v, rho = saved
    xp = namespace(a)

    def t(x: Array) -> Array:
        return xp.swapaxes(x, -1, -2)

    def over_batch(x: Array, n_axes: int) -> Array:
        return x.reshape(-1, *x.shape[x.ndim - n_axes :]).sum(axis=0)

    d_v = t(rho) @ dy @ head.w_v.T  # eq 22  (..., T, d)
    dw_v = over_batch(t(rho @ a) @ dy, 2)  # eq 23  (d, d_h)
    db_v = over_batch(dy, 1)  # eq 21, 24  (d_h,): ρ cancels, because its rows sum to 1

    d_causal = softmax_backward(dy @ t(v), rho)  # eq 25  (..., T, T)
    d_scaled = d_causal  # eq 27
    d_raw = d_scaled / math.sqrt(q.shape[-1])  # eq 28

    d_q = d_raw @ k @ head.w_q.T  # eq 30.a  (..., T, d)
    d_k = t(d_raw) @ q @ head.w_k.T  # eq 30.b  (..., T, d)
    dw_q = over_batch(t(a) @ d_raw @ k, 2)  # eq 31.a  (d, d_ρ)
    dw_k = over_batch(t(d_raw @ a) @ q, 2)  # eq 31.b  (d, d_ρ)
    db_q = over_batch(d_raw @ k, 1)  # eq 32.a  (d_ρ,)
    db_k = xp.zeros_like(head.b_k)  # eq 29, 32.b: exactly 0, not the rounding noise of the sum
    return d_v + d_q + d_k, Head(dw_q, db_q, dw_k, db_k, dw_v, db_v)  # eq 33


def heads_forward(a: Array, heads: Sequence[Head], causal: bool = True) -> tuple[Array, list[AttentionHeadSaved]]:
    """The heads' outputs, concatenated to (..., T, Σ d_h)."""
    outputs, saved = zip(*(head_forward(a, head, causal) for head in heads), strict=True)
    return namespace(a).concatenate(outputs, axis=-1), list(saved)  # eq 34


def heads_backward(dy: Array, saved: list[AttentionHeadSaved]) -> tuple[Array, list[Head]]:
    """The gradient of a, and each head's gradients. Each head gets its own columns of dy."""
    da, grads, column = 0, [], 0
    for one in saved:
        width = one.v.shape[-1]
        da_h, grads_h = head_backward(dy[..., column : column + width], one)
        da = da + da_h  # eq 35
        grads.append(grads_h)
        column += width
    return da, grads
