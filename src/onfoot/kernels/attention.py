"""Attention without the Tq × Tk matrix in memory: each thread computes whole heads.

Several consecutive query heads may share one key/value head.

q, k and v may be views, such as heads of one array with all three: only their last axis must be contiguous. The
results have the memory layout (..., T, H, D), so that concatenating the heads again is free.
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
from onfoot.kernels.shapes import (
    ARRAYS,
    contiguous,
    copied,
    copy_into,
    fall_back_to_formula,
    is_float32,
    thread_range,
    threads,
    upstream,
)
from onfoot.kernels.simd import address
from onfoot.recording.recorded_array import RecordedArray, data_address


class AttentionKernelSaved(NamedTuple):
    q: np.ndarray  # (B, H, Tq, Dk)
    k: np.ndarray  # (B, Hkv, Tk, Dk)
    v: np.ndarray  # (B, Hkv, Tk, Dv)
    start: np.ndarray  # (B, H, Tq), or empty
    keep: np.ndarray  # (B, H, Tq, Tk), the dropout pattern, or empty
    causal: bool
    lead: tuple[int, ...]  # the leading axes of the input


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
    first, last = thread_range(batch * heads, 1, thread, threads)
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
    first, last = thread_range(batch * k.shape[1], 1, thread, threads)
    for task in range(first * group, last * group):  # all query heads of a key/value head are on one thread
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
        x = copied(x) if type(x) is RecordedArray else np.array(x, dtype=np.float32, order="C")
    if x.ndim < 4:
        return x.reshape((1,) * (4 - x.ndim) + x.shape)
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def empty_heads(batch: int, heads: int, tokens: int, width: int) -> np.ndarray:
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
    """y = ρ v, each token's weighted average of the values it may attend to. `keep` is a dropout pattern for ρ."""
    matching = is_float32(q, k, v) and q.ndim > 1 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    matching = matching and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not matching or not start_matches(start, q) or not keep_matches(keep, q, k):
        return fall_back_to_formula(ops.attention_forward, q, k, v, causal, start, keep)
    lead = q.shape[:-2]
    q4, k4, v4 = four_axes(q), four_axes(k), four_axes(v)
    y, saved = forward(q4, k4, v4, causal, start, keep, lead)
    return y.reshape(*lead, *y.shape[2:]), saved


def start_matches(start: Any, q: np.ndarray) -> bool:
    """Whether `start` is None, or has one integer per query (..., Tq)."""
    if start is None:
        return True
    if type(start) not in ARRAYS or start.dtype.kind not in "iu" or start.ndim >= q.ndim:
        return False
    return all(a in (1, b) for a, b in zip(reversed(start.shape), reversed(q.shape[:-1]), strict=False))


def keep_matches(keep: Any, q: np.ndarray, k: np.ndarray) -> bool:
    """Whether `keep` is None, or has one number per query and key (..., Tq, Tk)."""
    return keep is None or (is_float32(keep) and keep.shape == (*q.shape[:-1], k.shape[-2]))


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool,
    start: np.ndarray | None,
    keep: np.ndarray | None,
    lead: tuple[int, ...],
) -> tuple[np.ndarray, AttentionKernelSaved]:
    """`attention_forward` for arrays (B, H, T, D)."""
    batch, heads, n_q, d_k = q.shape
    n_k, d_v = v.shape[2:]
    starts = _NO_START
    if start is not None:
        if type(start) is not RecordedArray:  # before the cast to int64: a huge unsigned value must not become negative
            start = np.ascontiguousarray(np.clip(start, 0, k.shape[2]), np.int64)
        starts = np.broadcast_to(start, (*lead, n_q)).reshape(batch, heads, n_q)
        if starts.strides[-1] != starts.itemsize:  # the kernel needs each head's to be contiguous
            starts = np.ascontiguousarray(starts)
    kept = _NO_KEEP if keep is None else contiguous(keep).reshape(batch, heads, n_q, n_k)
    y = empty_heads(batch, heads, n_q, d_v)
    work = scratch(threads(), forward_floats(n_k, d_k, d_v))
    _forward(q, k, v, y, starts, kept, bool(causal), work)
    return y, AttentionKernelSaved(q, k, v, starts, kept, bool(causal), lead)


def attention_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of q, k and v."""
    if not isinstance(saved, AttentionKernelSaved):
        return ops.attention_backward(dy, saved)
    dq, dk, dv = _empty_gradients(saved)
    dy = upstream(dy, (*saved.lead, saved.q.shape[2], saved.v.shape[3]), any_layout=True)
    backward(four_axes(dy), saved, dq, dk, dv)
    if len(saved.lead) != 2:
        dq, dk, dv = (x.reshape(*saved.lead, *x.shape[2:]) for x in (dq, dk, dv))
    return dq, dk, dv


def _empty_gradients(saved: AttentionKernelSaved) -> list[np.ndarray]:
    """Arrays for dq, dk and dv: views of one array (B, T, 2 H Dk + H Dv) if q, k and v are."""
    q, k, v = saved[:3]
    sizes = [x.shape for x in (q, k, v)]
    at, width = data_address(q), sizes[0][1] * sizes[0][3] * FLOAT
    same_shape = sizes[0] == sizes[1] and sizes[0][:3] == sizes[2][:3]
    if not same_shape or data_address(k) != at + width or data_address(v) != at + 2 * width:
        return [empty_heads(*shape) for shape in sizes]
    batch, heads, tokens, _ = sizes[0]
    widths = [heads * shape[3] for shape in sizes]
    combined, out, begin = empty((batch, tokens, sum(widths))), [], 0
    for width, shape in zip(widths, sizes, strict=True):
        part = combined[..., begin : begin + width]
        out.append(part.reshape(batch, tokens, heads, shape[3]).swapaxes(1, 2))
        begin += width
    return out


def side_by_side(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the last axis: (..., A), (..., B), ... -> (..., A + B + ...); no copy if already adjacent."""
    first, width = parts[0], sum(x.shape[-1] for x in parts)
    if not is_float32(*parts) or first.ndim > 4:
        return np.concatenate(parts, axis=-1)
    shape, at, adjacent = (*first.shape[:-1], width), data_address(first), True
    for x in parts:
        steps = [s for n, s in zip(x.shape[:-1], x.strides, strict=False) if n > 1]
        adjacent = adjacent and data_address(x) == at and x.shape[:-1] == shape[:-1] and x.strides[-1] == FLOAT
        adjacent = adjacent and steps == [s for n, s in zip(shape[:-1], first.strides, strict=False) if n > 1]
        at += x.shape[-1] * FLOAT
    combined = np.lib.stride_tricks.as_strided(first.view(np.ndarray), shape, first.strides).view(type(first))
    if adjacent and combined.flags.c_contiguous:
        return combined
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
