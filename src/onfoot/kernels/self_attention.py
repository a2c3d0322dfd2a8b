"""Self-attention from one array of queries, keys and values side by side: heads are cut out as views, not copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot.kernels import attention
from onfoot.kernels.buffers import empty
from onfoot.kernels.shapes import upstream


class Saved(NamedTuple):
    heads: Any
    n_head: int
    key_width: int


def _cut(qkv: np.ndarray, n_head: int, key_width: int) -> list[np.ndarray]:
    """(B, T, H (2 d_ρ + d_h)) -> views q, k, v (B, H, T, D)."""
    b, t, _ = qkv.shape
    qk = n_head * key_width
    parts = qkv[..., :qk], qkv[..., qk : 2 * qk], qkv[..., 2 * qk :]
    return [part.reshape(b, t, n_head, part.shape[2] // n_head).swapaxes(1, 2) for part in parts]


def self_attention_forward(
    qkv: np.ndarray,
    n_head: int,
    key_width: int,
    causal: bool = True,
    start: np.ndarray | None = None,
    keep: np.ndarray | None = None,
) -> tuple[np.ndarray, Any]:
    """y = the heads' ρ v side by side, (B, T, H d_h), from q | k | v, (B, T, H (2 d_ρ + d_h))."""
    q, k, v = _cut(qkv, n_head, key_width)
    y, saved = attention.attention_forward(q, k, v, causal, start, keep)
    return y.swapaxes(1, 2).reshape(*qkv.shape[:2], -1), Saved(saved, n_head, key_width)  # eq 34


def self_attention_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """The gradient of q | k | v."""
    heads, n_head, key_width = saved
    if isinstance(heads, attention.Saved):
        batch, count, tokens, _ = heads.q.shape
        dy = upstream(dy, (batch, tokens, count * heads.v.shape[3]))
    b, t, width = dy.shape
    up = dy.reshape(b, t, n_head, width // n_head).swapaxes(1, 2)
    dqkv = empty((b, t, 2 * n_head * key_width + width), dy.dtype)
    parts = _cut(dqkv, n_head, key_width)
    if isinstance(heads, attention.Saved):
        attention.backward(attention.four_axes(up), heads, *parts)
    else:
        for part, grad in zip(parts, attention.attention_backward(up, heads), strict=True):
            part[...] = grad
    return dqkv


KERNELS = attention.KERNELS
