"""Attention without the Tq × Tk matrix in memory: each thread takes whole heads.

Several heads of queries, one after the other, may share a head of keys and values.

q, k and v may be views, such as heads cut from one array of all three: only their last axis must be contiguous. The
results have the layout (..., T, H, D), so that putting the heads side by side again is free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.attention_head import (
    backward_floats,
    forward_floats,
    head_backward,
    head_forward,
)
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.jit import kernel
from onfoot.kernels.shapes import fits, formula, share, threads, upstream
from onfoot.kernels.simd import address

FLOAT = 4  # bytes


class Saved(NamedTuple):
    q: np.ndarray  # (B, H, Tq, Dk)
    k: np.ndarray  # (B, Hkv, Tk, Dk)
    v: np.ndarray  # (B, Hkv, Tk, Dv)
    lse: np.ndarray  # (B, H, Tq): the logarithms of the softmax's normalisers
    start: np.ndarray  # (B, H, Tq), or empty
    causal: bool
    lead: tuple[int, ...]  # the leading axes as they came


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,::1], i8[:,:,:], b1, f4[:,:]",
    "b h q d, b g k d, b g k e, b h q e, b h q, b h q?, , threads .",
)
def _forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    y: np.ndarray,
    lse: np.ndarray,
    start: np.ndarray,
    causal: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    batch, heads, n_q, d_k = q.shape
    group = heads // k.shape[1]
    first, last = share(batch * heads, 1, thread, threads)
    for task in range(first, last):
        b, h = task // heads, task % heads
        head_forward(
            address(q) + b * q.strides[0] + h * q.strides[1],
            q.strides[2],
            address(k) + b * k.strides[0] + h // group * k.strides[1],
            k.strides[2],
            address(v) + b * v.strides[0] + h // group * v.strides[1],
            v.strides[2],
            address(y) + b * y.strides[0] + h * y.strides[1],
            y.strides[2],
            address(lse) + task * n_q * FLOAT,
            address(start) + b * start.strides[0] + h * start.strides[1] if start.size else 0,
            n_q,
            k.shape[2],
            d_k,
            v.shape[3],
            1 if causal else 0,
            address(work) + thread * work.strides[0],
        )


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,::1], i8[:,:,:], b1, "
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:]",
    "b h q e, b h q d, b g k d, b g k e, b h q, b h q?, , b h q d, b g k d, b g k e, threads .",
)
def _backward(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lse: np.ndarray,
    start: np.ndarray,
    causal: bool,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    batch, heads, n_q, d_k = q.shape
    group = heads // k.shape[1]
    first, last = share(batch * k.shape[1], 1, thread, threads)
    for task in range(first * group, last * group):  # all that share a key are one thread's
        b, h = task // heads, task % heads
        head_backward(
            address(dy) + b * dy.strides[0] + h * dy.strides[1],
            dy.strides[2],
            address(q) + b * q.strides[0] + h * q.strides[1],
            q.strides[2],
            address(k) + b * k.strides[0] + h // group * k.strides[1],
            k.strides[2],
            address(v) + b * v.strides[0] + h // group * v.strides[1],
            v.strides[2],
            address(lse) + task * n_q * FLOAT,
            address(start) + b * start.strides[0] + h * start.strides[1] if start.size else 0,
            address(dq) + b * dq.strides[0] + h * dq.strides[1],
            dq.strides[2],
            address(dk) + b * dk.strides[0] + h // group * dk.strides[1],
            dk.strides[2],
            address(dv) + b * dv.strides[0] + h // group * dv.strides[1],
            dv.strides[2],
            n_q,
            k.shape[2],
            d_k,
            v.shape[3],
            1 if causal else 0,
            1 if h % group else 0,
            address(work) + thread * work.strides[0],
        )


_NO_START = np.empty((0, 0, 0), np.int64)


def four_axes(x: np.ndarray) -> np.ndarray:
    """(..., T, D) -> (B, H, T, D), with a contiguous last axis."""
    if x.strides[-1] != x.itemsize or not x.flags.behaved or x.dtype != np.float32:
        x = np.array(x, dtype=np.float32, order="C")
    if x.ndim < 4:
        return x.reshape((1,) * (4 - x.ndim) + x.shape)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def heads_beside(batch: int, heads: int, tokens: int, width: int) -> np.ndarray:
    """An array (B, H, T, D) whose memory is (B, T, H, D)."""
    return empty((batch, tokens, heads, width)).swapaxes(1, 2)


def attention_forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = True,
    start: np.ndarray | None = None,
    keep: np.ndarray | None = None,
) -> tuple[np.ndarray, Any]:
    """y = ρ v, each token's weighted average of the values it may see. With dropout, the formulas of `ops` are used."""
    together = fits(q, k, v) and q.ndim > 1 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    together = together and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if keep is not None or not together or not fits_start(start, q):
        return formula(ops.attention_forward, q, k, v, causal, start, keep)
    lead = q.shape[:-2]
    q4, k4, v4 = four_axes(q), four_axes(k), four_axes(v)
    y, saved = forward(q4, k4, v4, causal, start, lead)
    return y.reshape(*lead, *y.shape[2:]), saved


def fits_start(start: Any, q: np.ndarray) -> bool:
    """Whether `start` is an integer, or nothing, for each query (..., Tq)."""
    if start is None:
        return True
    if type(start) is not np.ndarray or start.dtype.kind not in "iu" or start.ndim >= q.ndim:
        return False
    return all(a in (1, b) for a, b in zip(reversed(start.shape), reversed(q.shape[:-1]), strict=False))


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, start: np.ndarray | None, lead: tuple[int, ...]
) -> tuple[np.ndarray, Saved]:
    """The same for arrays (B, H, T, D)."""
    batch, heads, n_q, d_k = q.shape
    n_k, d_v = v.shape[2:]
    starts = _NO_START
    if start is not None:
        within = np.clip(start, 0, k.shape[2])  # before 64 bits: a huge unsigned one must not become negative
        starts = np.array(np.broadcast_to(within, (*lead, n_q)), dtype=np.int64, order="C").reshape(batch, heads, n_q)
    y, lse = heads_beside(batch, heads, n_q, d_v), empty((batch, heads, n_q))
    work = scratch(threads(), forward_floats(n_k, d_k, d_v))
    _forward(q, k, v, y, lse, starts, bool(causal), work)
    return y, Saved(q, k, v, lse, starts, bool(causal), lead)


def attention_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k and v."""
    if not isinstance(saved, Saved):
        return ops.attention_backward(dy, saved)
    dq, dk, dv = (heads_beside(*x.shape) for x in saved[:3])
    backward(four_axes(upstream(dy, (*saved.lead, saved.q.shape[2], saved.v.shape[3]))), saved, dq, dk, dv)
    if len(saved.lead) != 2:
        dq, dk, dv = (x.reshape(*saved.lead, *x.shape[2:]) for x in (dq, dk, dv))
    return dq, dk, dv


def backward(dy: np.ndarray, saved: Saved, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> None:
    """Writes the gradients into arrays (B, H, T, D)."""
    q, k, v, lse, start, causal, _ = saved
    work = scratch(threads(), backward_floats(k.shape[2], q.shape[3], v.shape[3]))
    _backward(dy, q, k, v, lse, start, causal, dq, dk, dv, work)


KERNELS = (head_forward, head_backward, _forward, _backward)
