"""One new token of each sequence through GPT-2's blocks, with all that can be settled before settled once.

A token's products take as long as their weights take to be read; what Python does between them comes on top. So the
kernels of a whole token are listed once, with their arguments: buffers that are used again for every token, and a
cache that has room for all of them. A token is then nothing but the calls of that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.kernels import activation, attention, layer_norm, linear
from onfoot.kernels.activation import activation_call
from onfoot.kernels.attention_head import forward_floats, head_forward
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.jit import Call, kernel
from onfoot.kernels.layer_norm import layer_norm_call
from onfoot.kernels.linear import affine_calls, fits_weight
from onfoot.kernels.product import FLOAT, LINE, NO_ROWS
from onfoot.kernels.shapes import as_rows, fits, share, threads
from onfoot.kernels.simd import address

PER_BLOCK = 12  # parameters


@kernel("f4[:,::1], f4[:,:,:,::1], f4[:,:,:,::1], i8[::1], i8[::1], f4[:,::1], f4[:,:]")
def _attention(
    qkv: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: np.ndarray,
    start: np.ndarray,
    y: np.ndarray,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Adds each sequence's k and v to the cache, behind the `length` that are there, and lets its q see them all."""
    batch, heads, _, d_k = keys.shape
    d_v, n = values.shape[3], length[0]
    first, last = share(batch * heads, 1, thread, threads)
    spare = address(work) + thread * work.strides[0]
    for task in range(first, last):
        b, h = task // heads, task % heads
        k, v = (heads + h) * d_k, 2 * heads * d_k + h * d_v
        for d in range(d_k):
            keys[b, h, n, d] = qkv[b, k + d]
        for d in range(d_v):
            values[b, h, n, d] = qkv[b, v + d]
        head_forward(
            address(qkv) + b * qkv.strides[0] + h * d_k * FLOAT,
            0,
            address(keys) + b * keys.strides[0] + h * keys.strides[1],
            keys.strides[2],
            address(values) + b * values.strides[0] + h * values.strides[1],
            values.strides[2],
            address(y) + b * y.strides[0] + h * d_v * FLOAT,
            0,
            spare,
            address(start) + b * 8,
            1,
            n + 1,
            d_k,
            d_v,
            1,
            spare + LINE * FLOAT,
        )


class Decoder:
    """The blocks of a GPT-2 for tokens that come one after the other."""

    def __init__(
        self,
        params: Sequence[Any],
        cache: Sequence[tuple[np.ndarray, np.ndarray]],
        start: np.ndarray,
        eps: float,
        activation: str,
    ) -> None:
        self._params, self._cache, self._start, self._eps, self._activation = params, cache, start, eps, activation
        self._x, self._length = empty((start.size, params[0].shape[0])), np.zeros(1, np.int64)
        self._calls: list[Call] = []
        self._threads = 0

    def __call__(self, x: np.ndarray, length: int) -> np.ndarray:
        """a_1 -> the last a_10, (B, 1, C), valid until the next call; `length` tokens stand in the cache."""
        room = self._cache[0][0].shape[2]
        if not 0 <= length < room:
            raise IndexError(f"a token behind {length} others: the cache has room for {room}")
        if self._threads != threads():
            self._threads, self._calls = threads(), self._list()
        self._x[...] = as_rows(x)
        self._length[0] = length
        for call, args in self._calls:
            call(*args)
        return self._x.reshape(x.shape)

    def _list(self) -> list[Call]:
        x, batch, c = self._x, *self._x.shape
        (_, heads, room, d_k), d_v = self._cache[0][0].shape, self._cache[0][1].shape[3]
        normed, qkv, a3, a5 = (empty((batch, n)) for n in (c, heads * (2 * d_k + d_v), heads * d_v, c))
        work = scratch(threads(), LINE + forward_floats(room, d_k, d_v))
        calls: list[Call] = []
        for b, (keys, values) in enumerate(self._cache):
            own = self._params[b * PER_BLOCK : (b + 1) * PER_BLOCK]
            norm_1, attn, proj, norm_2, expand, contract = zip(own[::2], own[1::2], strict=True)  # weight and bias
            a7, a8 = empty((batch, expand[0].shape[1])), empty((batch, expand[0].shape[1]))
            calls += [
                layer_norm_call(x, *norm_1, self._eps, normed),
                *affine_calls(normed, *attn, NO_ROWS, qkv),
                (_attention, (qkv, keys, values, self._length, self._start, a3, work)),
                *affine_calls(a3, *proj, x, a5),  # a_1 + a_4
                layer_norm_call(a5, *norm_2, self._eps, normed),
                *affine_calls(normed, *expand, NO_ROWS, a7),
                activation_call(self._activation, a7, a8),
                *affine_calls(a8, *contract, a5, x),  # a_5 + a_9
            ]
        return calls


def gpt2_decoder(
    params: Sequence[Any],
    cache: Sequence[tuple[np.ndarray, np.ndarray]],
    start: np.ndarray | None,
    eps: float,
    activation: str,
) -> Decoder | None:
    """What decodes with these parameters and this cache; None where the kernels do not take them.

    Of each block, the parameters are weight and bias of ln_1, c_attn, attention's c_proj, ln_2, c_fc, the MLP's c_proj,
    the cache is keys and values, (B, H, room, D). `start` (B,) is the first token that each sequence may see.
    """
    arrays = [x for x in params if isinstance(x, np.ndarray)] + [x for pair in cache for x in pair]
    if not all(map(fits_weight, params)) or not fits(*arrays) or not all(x.flags.c_contiguous for x in arrays):
        return None
    first = np.zeros(cache[0][0].shape[0], np.int64) if start is None else np.array(start, np.int64)
    return Decoder(params, cache, first, eps, activation)


KERNELS = (*linear.KERNELS, *layer_norm.KERNELS, *attention.KERNELS, *activation.KERNELS, _attention)
