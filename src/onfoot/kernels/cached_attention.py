"""Attention of one new token per sequence over a KV cache, to which its key and value are appended."""

from __future__ import annotations

import numpy as np

from onfoot.kernels.attention import empty_heads, four_axes
from onfoot.kernels.attention_head import Mask, forward_floats, head_forward
from onfoot.kernels.buffers import scratch
from onfoot.kernels.jit import kernel
from onfoot.kernels.matrix import FLOAT, Matrix, head_of
from onfoot.kernels.shapes import ARRAYS, is_float32, thread_range, threads
from onfoot.kernels.simd import address, floats
from onfoot.recording.recorded_array import active


@kernel(
    "f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,::1], f4[:,:,:,::1], i8[::1], i8[::1], i8[::1], f4[:,:,:,:], "
    "f4[:,:]",
    "b h t d, b g t d, b g t e, s g r d, s g r e, ., b, b, b h t e, threads .",
)
def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: np.ndarray,
    start: np.ndarray,
    slots: np.ndarray,
    y: np.ndarray,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Appends each sequence's k and v to its slot of the cache after `length` tokens; q then attends to all of them."""
    n_slots, shared, room, d_k = keys.shape
    batch, d_v, group = q.shape[0], values.shape[3], q.shape[1] // shared
    first, last = thread_range(batch * shared, 1, thread, threads)
    spare = address(work) + thread * work.strides[0]
    for task in range(first, last):
        b, g = task // shared, task % shared
        n, slot = length[b if length.size > 1 else 0], slots[b]
        if not (0 <= n < room and 0 <= slot < n_slots):
            continue
        mask = Mask(1, n + 1, address(start) + b * 8, True)
        key, kept = floats(address(k) + b * k.strides[0] + g * k.strides[1], d_k), keys[slot, g, n]
        value, stays = floats(address(v) + b * v.strides[0] + g * v.strides[1], d_v), values[slot, g, n]
        for d in range(d_k):
            kept[d] = key[d]
        for d in range(d_v):
            stays[d] = value[d]
        for h in range(g * group, (g + 1) * group):
            query, to, none = head_of(q, b, h), head_of(y, b, h), Matrix(0, 0, FLOAT)
            head_forward(query, head_of(keys, slot, g), head_of(values, slot, g), to, mask, none, d_k, d_v, spare)


def cached_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: np.ndarray,
    start: np.ndarray | None = None,
    slots: np.ndarray | None = None,
) -> np.ndarray | None:
    """y (B, H, 1, Dv); None if the kernel does not support these arrays.

    q is (B, H, 1, Dk), k and v (B, Hkv, 1, D); the cache, `keys` and `values`, (B, Hkv, capacity, D), of which the
    first `length` (1,) tokens are filled. `start` (B,): the first token that each sequence may attend to. With `slots`
    (B,), the cache is (slots, Hkv, capacity, D), each sequence is in its own slot, and `length` is (B,).
    """
    if not is_float32(q, k, v, keys, values) or not (keys.flags.carray and values.flags.carray):
        return None
    if any(x.ndim != 4 for x in (q, k, v, keys, values)):
        shapes = ", ".join(str(x.shape) for x in (q, k, v, keys, values))
        raise ValueError(f"q, k, v and the cache must have 4 axes, got shapes {shapes}")
    if q.shape[2] != 1 or k.shape[2] != 1 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q and k must have one new token per sequence, got shapes {q.shape} and {k.shape}")
    if slots is None and len(keys) != len(q):
        raise ValueError(f"the cache must have as many sequences as q, got shapes {keys.shape} and {q.shape}")
    batch, heads, _, d_k = q.shape
    d_v, room = values.shape[3], keys.shape[2]
    first = np.zeros(batch, np.int64) if start is None else start
    rows = np.arange(batch) if slots is None else slots
    several = (1,) if slots is None else (batch,)
    for name, x, shape in (("length", length, several), ("start", first, (batch,)), ("slots", rows, (batch,))):
        if type(x) not in ARRAYS or x.dtype != np.int64 or x.shape != shape:
            raise ValueError(f"{name} must be an int64 array of shape {shape}, got {getattr(x, 'dtype', x)!r}")
    if active.recorder is None and not 0 <= int(length.min()) <= int(length.max()) < room:
        raise IndexError(f"cannot add token {int(length.max())}: the KV cache has capacity {room}; use a larger one")
    if active.recorder is None and not 0 <= int(rows.min()) <= int(rows.max()) < len(keys):
        raise IndexError(f"slots must be in [0, {len(keys)}), got {rows.tolist()}")
    y = empty_heads(batch, heads, 1, d_v)
    work = scratch(threads(), forward_floats(room, d_k, d_v))
    _attend(four_axes(q), four_axes(k), four_axes(v), keys, values, length, first, rows, y, work)
    return y


KERNELS = (_attend,)
