"""Grouped-query attention: the kernels of attention, in which query heads may share a key/value head."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot import ops
from onfoot.kernels import attention
from onfoot.kernels.attention import (
    AttentionKernelSaved,
    attention_backward,
    forward,
    four_axes,
    keep_matches,
    start_matches,
)
from onfoot.kernels.shapes import fall_back_to_formula, is_float32


def grouped_query_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = True,
    start: np.ndarray | None = None,
    keep: np.ndarray | None = None,
) -> tuple[np.ndarray, Any]:
    """y = ρ v for each query head, (B, H, Tq, Dv); query head h reads the keys and values of head h // (H / Hkv)."""
    matching = (
        is_float32(q, k, v)
        and q.ndim == k.ndim == v.ndim == 4
        and k.shape[:3] == v.shape[:3]
        and q.shape[::3] == k.shape[::3]
    )
    known = start is None or (start_matches(start, q) and start.ndim > 1 and start.shape[-2] in (1, q.shape[1]))
    if not matching or not known or not keep_matches(keep, q, k) or q.shape[1] % k.shape[1]:
        return fall_back_to_formula(ops.grouped_query_forward, q, k, v, causal, start, keep)
    return forward(four_axes(q), four_axes(k), four_axes(v), causal, start, keep, q.shape[:2])  # eq GQA.1


def grouped_query_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k and v: those of k and v are summed over the query heads that share them."""
    if not isinstance(saved, AttentionKernelSaved):
        return ops.grouped_query_backward(dy, saved)
    return attention_backward(dy, saved)  # eq GQA.2, GQA.3


KERNELS = attention.KERNELS
