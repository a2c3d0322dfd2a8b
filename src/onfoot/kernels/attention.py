"""Attention without the Tq × Tk matrix in memory: each thread takes whole heads.

Several heads of queries, one after the other, may share a head of keys and values.

q, k and v may be views, such as heads cut from one array of all three: only their last axis must be contiguous. The
results have the layout (..., T, H, D), so that putting the heads side by side again is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import shapes
from onfoot.kernels.attention_head import Mask, backward_floats, forward_floats, head_backward, head_forward
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.jit import kernel
from onfoot.kernels.matrix import FLOAT, head_of
from onfoot.kernels.shapes import ARRAYS, contiguous, copied, copy_into, fits, formula, share, threads, upstream
from onfoot.kernels.simd import address
from onfoot.recording.planned import Planned, place


class AttentionKernelSaved(NamedTuple):
    q: np.ndarray  # (B, H, Tq, Dk)
    k: np.ndarray  # (B, Hkv, Tk, Dk)
    v: np.ndarray  # (B, Hkv, Tk, Dv)
    start: np.ndarray  # (B, H, Tq), or empty
    keep: np.ndarray  # (B, H, Tq, Tk), the dropout pattern, or empty
    causal: bool
    lead: tuple[int, ...]  # the leading axes as they came


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], i8[:,:,:], f4[:,:,:,::1], b1, f4[:,:]",
    "b h q d, b g k d, b g k e, b h q e, b h q?, b h q k?, , threads .",
)
def _forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    keep: np.ndarray,
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
        first_keys = address(start) + b * start.strides[0] + h * start.strides[1] if start.size else 0
        mask = Mask(n_q, k.shape[2], first_keys, causal)
        keys, values = head_of(k, b, h // group), head_of(v, b, h // group)
        spare = address(work) + thread * work.strides[0]
        head_forward(
            head_of(q, b, h), keys, values, head_of(y, b, h), mask, head_of(keep, b, h), d_k, v.shape[3], spare
        )


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], i8[:,:,:], f4[:,:,:,::1], b1, "
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:]",
    "b h q e, b h q d, b g k d, b g k e, b h q?, b h q k?, , b h q d, b g k d, b g k e, threads .",
)
def _backward(
    dy: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    start: np.ndarray,
    keep: np.ndarray,
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
        first_keys = address(start) + b * start.strides[0] + h * start.strides[1] if start.size else 0
        mask = Mask(n_q, k.shape[2], first_keys, causal)
        head_backward(
            head_of(dy, b, h),
            head_of(q, b, h),
            head_of(k, b, h // group),
            head_of(v, b, h // group),
            mask,
            head_of(keep, b, h),
            head_of(dq, b, h),
            head_of(dk, b, h // group),
            head_of(dv, b, h // group),
            d_k,
            v.shape[3],
            h % group > 0,
            address(work) + thread * work.strides[0],
        )


_NO_START = np.empty((0, 0, 0), np.int64)
_NO_KEEP = np.empty((0, 0, 0, 0), np.float32)


def four_axes(x: np.ndarray) -> np.ndarray:
    """(..., T, D) -> (B, H, T, D), with a contiguous last axis."""
    if x.strides[-1] != x.itemsize or not x.flags.behaved or x.dtype != np.float32:
        x = copied(x) if type(x) is Planned else np.array(x, dtype=np.float32, order="C")
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
    """y = ρ v, each token's weighted average of the values it may see. `keep` is a dropout pattern for ρ."""
    together = fits(q, k, v) and q.ndim > 1 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    together = together and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not together or not fits_start(start, q) or not fits_keep(keep, q, k):
        return formula(ops.attention_forward, q, k, v, causal, start, keep)
    lead = q.shape[:-2]
    q4, k4, v4 = four_axes(q), four_axes(k), four_axes(v)
    y, saved = forward(q4, k4, v4, causal, start, keep, lead)
    return y.reshape(*lead, *y.shape[2:]), saved


def fits_start(start: Any, q: np.ndarray) -> bool:
    """Whether `start` is an integer, or nothing, for each query (..., Tq)."""
    if start is None:
        return True
    if type(start) not in ARRAYS or start.dtype.kind not in "iu" or start.ndim >= q.ndim:
        return False
    return all(a in (1, b) for a, b in zip(reversed(start.shape), reversed(q.shape[:-1]), strict=False))


def fits_keep(keep: Any, q: np.ndarray, k: np.ndarray) -> bool:
    """Whether `keep` is nothing, or a number for each query and key (..., Tq, Tk)."""
    return keep is None or (fits(keep) and keep.shape == (*q.shape[:-1], k.shape[-2]))


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool,
    start: np.ndarray | None,
    keep: np.ndarray | None,
    lead: tuple[int, ...],
) -> tuple[np.ndarray, AttentionKernelSaved]:
    """The same for arrays (B, H, T, D)."""
    batch, heads, n_q, d_k = q.shape
    n_k, d_v = v.shape[2:]
    starts = _NO_START
    if start is not None:
        if type(start) is not Planned:  # before 64 bits: a huge unsigned one must not become negative
            start = np.ascontiguousarray(np.clip(start, 0, k.shape[2]), np.int64)
        starts = np.broadcast_to(start, (*lead, n_q)).reshape(batch, heads, n_q)
        if starts.strides[-1] != starts.itemsize:  # the kernel reads a head's one after the other
            starts = np.ascontiguousarray(starts)
    kept = _NO_KEEP if keep is None else contiguous(keep).reshape(batch, heads, n_q, n_k)
    y = heads_beside(batch, heads, n_q, d_v)
    work = scratch(threads(), forward_floats(n_k, d_k, d_v))
    _forward(q, k, v, y, starts, kept, bool(causal), work)
    return y, AttentionKernelSaved(q, k, v, starts, kept, bool(causal), lead)


def attention_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k and v."""
    if not isinstance(saved, AttentionKernelSaved):
        return ops.attention_backward(dy, saved)
    dq, dk, dv = _all_beside(saved)
    dy = upstream(dy, (*saved.lead, saved.q.shape[2], saved.v.shape[3]), as_it_lies=True)
    backward(four_axes(dy), saved, dq, dk, dv)
    if len(saved.lead) != 2:
        dq, dk, dv = (x.reshape(*saved.lead, *x.shape[2:]) for x in (dq, dk, dv))
    return dq, dk, dv


def _all_beside(saved: AttentionKernelSaved) -> list[np.ndarray]:
    """Places for dq, dk and dv: side by side in one array (B, T, 2 H Dk + H Dv) if q, k and v lie so."""
    q, k, v = saved[:3]
    sizes = [x.shape for x in (q, k, v)]
    at, width = place(q), sizes[0][1] * sizes[0][3] * FLOAT
    alike = sizes[0] == sizes[1] and sizes[0][:3] == sizes[2][:3]
    if not alike or place(k) != at + width or place(v) != at + 2 * width:
        return [heads_beside(*shape) for shape in sizes]
    batch, heads, tokens, _ = sizes[0]
    widths = [heads * shape[3] for shape in sizes]
    whole, out, begin = empty((batch, tokens, sum(widths))), [], 0
    for width, shape in zip(widths, sizes, strict=True):
        part = whole[..., begin : begin + width]
        out.append(part.reshape(batch, tokens, heads, shape[3]).swapaxes(1, 2))
        begin += width
    return out


def side_by_side(parts: Sequence[np.ndarray]) -> np.ndarray:
    """(..., A), (..., B), ... -> (..., A + B + ...); nothing is copied where they lie so already."""
    first, width = parts[0], sum(x.shape[-1] for x in parts)
    if not fits(*parts) or first.ndim > 4:
        return np.concatenate(parts, axis=-1)
    shape, at, beside = (*first.shape[:-1], width), place(first), True
    for x in parts:
        steps = [s for n, s in zip(x.shape[:-1], x.strides, strict=False) if n > 1]
        beside = beside and place(x) == at and x.shape[:-1] == shape[:-1] and x.strides[-1] == FLOAT
        beside = beside and steps == [s for n, s in zip(shape[:-1], first.strides, strict=False) if n > 1]
        at += x.shape[-1] * FLOAT
    whole = np.lib.stride_tricks.as_strided(first.view(np.ndarray), shape, first.strides).view(type(first))
    if beside and whole.flags.c_contiguous:
        return whole
    made, begin = empty(shape), 0
    for x in parts:
        copy_into(x, made[..., begin : begin + x.shape[-1]])
        begin += x.shape[-1]
    return made


def backward(dy: np.ndarray, saved: AttentionKernelSaved, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> None:
    """Writes the gradients into arrays (B, H, T, D)."""
    q, k, v, start, keep, causal, _ = saved
    work = scratch(threads(), backward_floats(k.shape[2], q.shape[3], v.shape[3]))
    _backward(dy, q, k, v, start, keep, causal, dq, dk, dv, work)


KERNELS = (*shapes.KERNELS, _forward, _backward)
