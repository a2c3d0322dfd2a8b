"""Grouped-query attention: several query heads share one key/value head.

Shapes: q (..., H, Tq, Dk), k (..., Hkv, Tk, Dk), v (..., Hkv, Tk, Dv); H is a multiple of Hkv, and query head h reads
the keys and values of head h // (H / Hkv). Nothing is repeated in memory: the shared head has a group axis of 1.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array
from onfoot.ops import attention
from onfoot.ops.attention import attention_backward, attention_forward


class GroupedQuerySaved(NamedTuple):
    shared: attention.AttentionSaved  # q (..., Hkv, G, Tq, Dk), k (..., Hkv, 1, Tk, Dk), v (..., Hkv, 1, Tk, Dv)


def grouped_query_forward(
    q: Array, k: Array, v: Array, causal: bool = True, start: Array | None = None, keep: Array | None = None
) -> tuple[Array, GroupedQuerySaved]:
    """y = ρ v for each query head, (..., H, Tq, Dv). `start` and `keep` are those of attention, for q's heads."""
    n_head, n_kv = q.shape[-3], k.shape[-3]
    if n_head % n_kv:
        raise ValueError(f"the number of query heads must be a multiple of the {n_kv} key/value heads, got {n_head}")
    if start is not None:
        start = grouped(start[..., None], n_kv)[..., 0] if start.shape[-2] == n_head else start[..., None, :, :]
    keep = None if keep is None else grouped(keep, n_kv)
    shared = (k[..., None, :, :], v[..., None, :, :])
    y, saved = attention_forward(grouped(q, n_kv), *shared, causal, start, keep)  # eq GQA.1
    return joined(y), GroupedQuerySaved(saved)


def grouped_query_backward(dy: Array, saved: GroupedQuerySaved) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v: those of k and v are summed over the query heads that share them."""
    dq, dk, dv = attention_backward(grouped(dy, saved.shared.k.shape[-4]), saved.shared)
    return joined(dq), dk.sum(axis=-3), dv.sum(axis=-3)  # eq GQA.2, GQA.3


def grouped(x: Array, n_kv: int) -> Array:
    """(..., H, T, D) -> (..., Hkv, G, T, D)."""
    return x.reshape(*x.shape[:-3], n_kv, x.shape[-3] // n_kv, *x.shape[-2:])


def joined(x: Array) -> Array:
    """(..., Hkv, G, T, D) -> (..., H, T, D)."""
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
