"""One new token of each sequence through a model's blocks, with all that can be settled before settled once.

A token's products take as long as their weights take to be read; what Python does between them comes on top. So the
kernels of a whole token are listed once, with their arguments: buffers that are used again for every token, and a
cache that has room for all of them. A token is then nothing but the calls of that list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from onfoot.kernels import activation, layer_norm, linear, rms_norm, swiglu
from onfoot.kernels.activation import activation_call
from onfoot.kernels.attention_head import forward_floats, head_forward
from onfoot.kernels.buffers import empty, own_scratch, scratch
from onfoot.kernels.jit import Call, kernel
from onfoot.kernels.layer_norm import layer_norm_call
from onfoot.kernels.linear import affine_calls, fits_weight
from onfoot.kernels.product import FLOAT, LINE, NO_ROW, NO_ROWS
from onfoot.kernels.rms_norm import rms_norm_call
from onfoot.kernels.rope import turn
from onfoot.kernels.shapes import as_rows, fits, round_up, share, threads
from onfoot.kernels.simd import address, floats
from onfoot.kernels.swiglu import swiglu_call
from onfoot.quantized import Transposed

Layer = tuple[Any, Any]  # weight, (in, out) where it is linear, and bias or None
Cache = Sequence[tuple[np.ndarray, np.ndarray]]  # each block's keys and values, (B, Hkv, room, D)


@kernel(
    "f4[:,:], f4[:,:], f4[:,:], f4[:,::1], f4[:,::1], f4[:,:,:,::1], f4[:,:,:,::1], i8[::1], i8[::1], f4[:,::1], "
    "f4[:,:]",
    "b ., b ., b ., . ., . ., b g r d, b g r e, ., b, b ., threads .",
)
def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: np.ndarray,
    start: np.ndarray,
    y: np.ndarray,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Adds each sequence's k and v to the cache, behind the `length` that are there, and lets its q see them all.

    Where there are `cos` and `sin`, a row for each position, q and k are turned before.
    """
    batch, shared, _, d_k = keys.shape
    d_v, n, group = values.shape[3], length[0], q.shape[1] // (shared * d_k)
    first, last = share(batch * shared, 1, thread, threads)
    lse = address(work) + thread * work.strides[0]
    turned = lse + LINE * FLOAT
    spare = turned + round_up(d_k, LINE) * FLOAT
    for task in range(first, last):
        b, g = task // shared, task % shared
        key, kept = floats(address(k) + b * k.strides[0] + g * d_k * FLOAT, d_k), keys[b, g, n]
        value, stays = floats(address(v) + b * v.strides[0] + g * d_v * FLOAT, d_v), values[b, g, n]
        place = n - start[b]
        if cos.size:
            turn(key, cos[place], sin[place], 1, kept)
        else:
            for d in range(d_k):
                kept[d] = key[d]
        for d in range(d_v):
            stays[d] = value[d]
        for h in range(g * group, (g + 1) * group):
            query = address(q) + b * q.strides[0] + h * d_k * FLOAT
            if cos.size:
                turn(floats(query, d_k), cos[place], sin[place], 1, floats(turned, d_k))
                query = turned
            head_forward(
                query,
                0,
                address(keys) + b * keys.strides[0] + g * keys.strides[1],
                keys.strides[2],
                address(values) + b * values.strides[0] + g * values.strides[1],
                values.strides[2],
                address(y) + b * y.strides[0] + h * d_v * FLOAT,
                0,
                lse,
                address(start) + b * 8,
                1,
                n + 1,
                d_k,
                d_v,
                1,
                spare,
            )


class State(NamedTuple):
    """What changes from token to token, and is read and written where it lies."""

    x: np.ndarray  # (B, C)
    length: np.ndarray  # (1,): tokens in the cache
    start: np.ndarray  # (B,): the first token that each sequence may see
    cache: Cache


class Decoder:
    """The blocks of a model for tokens that come one after the other."""

    def __init__(self, width: int, cache: Cache, start: np.ndarray | None, make: Callable[[State], list[Call]]) -> None:
        batch = cache[0][0].shape[0]
        if start is not None and (type(start) is not np.ndarray or start.dtype.kind not in "iu"):
            raise ValueError(f"sequences begin at an array of integers, not at a {type(start).__name__}")
        first = np.zeros(batch, np.int64) if start is None else np.array(start, np.int64).reshape(batch)
        if first.min() < 0:
            raise ValueError(f"a sequence cannot begin at {first.min()}: 0 or above is needed")
        self._first = max(0, int(first.max()))  # before it, no token can be decoded: it would stand before its sequence
        self._state = State(empty((batch, width)), np.zeros(1, np.int64), first, cache)
        self._make, self._threads = make, 0
        self._calls: list[Call] = []

    def __call__(self, x: np.ndarray, length: int) -> np.ndarray:
        """a_1 -> the last a_10, (B, 1, C), valid until the next call; `length` tokens stand in the cache."""
        state = self._state
        room = state.cache[0][0].shape[2]
        if not self._first <= length < room:
            raise IndexError(f"a token behind {length} others: the cache has room for {room}; make one with more")
        if type(x) is not np.ndarray:
            raise TypeError(f"tokens as a {type(x).__name__}: a NumPy array is needed")
        rows = as_rows(x)
        if x.ndim != 3 or rows.shape != state.x.shape:
            raise ValueError(f"tokens of shape {x.shape} for a cache of {state.x.shape[0]} sequences of this width")
        if self._threads != threads():
            with own_scratch():
                self._threads, self._calls = threads(), self._make(state)
        state.x[...] = rows
        state.length[0] = length
        for call, args in self._calls:
            call(*args)
        return state.x.reshape(x.shape)


def _attend(
    state: State, b: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, cos: np.ndarray, sin: np.ndarray, y: np.ndarray
) -> Call:
    """What makes y from block b's q, k and v and its cache."""
    keys, values = state.cache[b]
    (_, _, room, d_k), d_v = keys.shape, values.shape[3]
    work = scratch(threads(), 2 * LINE + d_k + forward_floats(room, d_k, d_v))
    return _attention, (q, k, v, cos, sin, keys, values, state.length, state.start, y, work)


def _layer(x: np.ndarray, layer: Layer, y: np.ndarray, skip: np.ndarray = NO_ROWS) -> list[Call]:
    """What makes y = x w + b + skip."""
    weight, bias = layer
    return affine_calls(x, weight, NO_ROW if bias is None else bias, skip, y)


def _fit(layers: Sequence[Sequence[Layer]], cache: Cache) -> bool:
    """Whether the kernels take these parameters, as they lie, and this cache."""
    all_layers = [layer for block in layers for layer in block]
    flat = [x for pair in cache for x in pair] + [bias for _, bias in all_layers if bias is not None]
    weights = [weight for weight, _ in all_layers]
    dense = [x for x in weights if isinstance(x, np.ndarray)]
    if not fits(*flat) or not all(map(fits_weight, weights)):
        return False
    if not all(x.flags.writeable for pair in cache for x in pair):  # each token's key and value are written there
        return False
    return all(x.flags.c_contiguous for x in flat) and all(x.flags.forc for x in dense)


def _taken(layers: Sequence[Sequence[Layer]], cache: Cache, wanted: Sequence[tuple[int, ...]]) -> list[list[Layer]]:
    """The layers as views that nobody else can reshape, each of its size; `wanted` are the weights' of a block."""
    own = [[(w if isinstance(w, Transposed) else w.view(), b if b is None else b.view()) for w, b in x] for x in layers]
    room = cache[0][0].shape[:3]
    for block, (keys, values) in zip(own, cache, strict=True):
        sizes = tuple(tuple(weight.shape) for weight, _ in block)
        if sizes != tuple(wanted) or any(b is not None and b.shape != w.shape[-1:] for w, b in block):
            raise ValueError(f"weights of shapes {sizes} in a block of a decoder; {tuple(wanted)} are needed")
        if keys.shape != cache[0][0].shape or values.shape[:3] != room or values.shape != cache[0][1].shape:
            raise ValueError(f"keys {keys.shape} and values {values.shape} in a cache of {cache[0][0].shape}")
    return own


def gpt2_decoder(
    layers: Sequence[Sequence[Layer]], cache: Cache, start: np.ndarray | None, eps: float, function: str
) -> Decoder | None:
    """What decodes with these parameters and this cache; None where the kernels do not take them.

    A block's layers are ln_1, c_attn, attention's c_proj, ln_2, c_fc and the MLP's c_proj.
    """
    if not _fit(layers, cache):
        return None
    (_, heads, _, d_k), d_v = cache[0][0].shape, cache[0][1].shape[3]
    c, f = layers[0][0][0].size, layers[0][4][0].shape[-1]
    wide = heads * (2 * d_k + d_v)
    layers = _taken(layers, cache, [(c,), (c, wide), (heads * d_v, c), (c,), (c, f), (f, c)])
    if any(block[i][1] is None for block in layers for i in (0, 3)):
        raise ValueError("a layer norm has a bias, and one of a decoder's has none")

    def list_calls(state: State) -> list[Call]:
        x, batch, c = state.x, *state.x.shape
        inner = layers[0][4][0].shape[1]
        normed, qkv, a3, a5, a7, a8 = (
            empty((batch, n)) for n in (c, heads * (2 * d_k + d_v), heads * d_v, c, inner, inner)
        )
        q, k, v = qkv[:, : heads * d_k], qkv[:, heads * d_k : 2 * heads * d_k], qkv[:, 2 * heads * d_k :]
        calls: list[Call] = []
        for b, (norm_1, attn, proj, norm_2, expand, contract) in enumerate(layers):
            calls += [
                layer_norm_call(x, *norm_1, eps, normed),
                *_layer(normed, attn, qkv),
                _attend(state, b, q, k, v, NO_ROWS, NO_ROWS, a3),
                *_layer(a3, proj, a5, skip=x),  # a_1 + a_4
                layer_norm_call(a5, *norm_2, eps, normed),
                *_layer(normed, expand, a7),
                activation_call(function, a7, a8),
                *_layer(a8, contract, x, skip=a5),  # a_5 + a_9
            ]
        return calls

    return Decoder(layers[0][0][0].size, cache, start, list_calls)


def llama_decoder(
    layers: Sequence[Sequence[Layer]],
    cache: Cache,
    start: np.ndarray | None,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
) -> Decoder | None:
    """The same for LLaMA; `cos` and `sin` (room, D/2) turn a token at each position.

    A block's layers are the first norm, q, k, v, o, the second norm, gate, up and down.
    """
    if not _fit(layers, cache) or not fits(cos, sin) or not (cos.flags.c_contiguous and sin.flags.c_contiguous):
        return None
    (_, shared, room, d_k), d_v = cache[0][0].shape, cache[0][1].shape[3]
    c, f, wide = layers[0][0][0].size, layers[0][6][0].shape[-1], layers[0][1][0].shape[-1]
    narrow, out_of = [(c, shared * d_k), (c, shared * d_v)], (wide // d_k * d_v, c)
    layers = _taken(layers, cache, [(c,), (c, wide), *narrow, out_of, (c,), (c, f), (c, f), (f, c)])
    if wide % (shared * d_k) or cos.shape != sin.shape or cos.shape[0] < room or 2 * cos.shape[1] != d_k:
        raise ValueError(f"queries of width {wide} and angles {cos.shape}, {sin.shape} for a cache of {(room, d_k)}")
    cos, sin = cos.view(), sin.view()
    _, queries, keys, values, out, _, gating, _, _ = layers[0]

    def list_calls(state: State) -> list[Call]:
        x, batch, c = state.x, *state.x.shape
        widths = c, *(layer[0].shape[1] for layer in (queries, keys, values)), out[0].shape[0], c
        normed, q, k, v, a3, a5 = (empty((batch, n)) for n in widths)
        gate, up, a8 = (empty((batch, gating[0].shape[1])) for _ in range(3))
        calls: list[Call] = []
        for b, (norm_1, to_q, to_k, to_v, proj, norm_2, to_gate, to_up, down) in enumerate(layers):
            calls += [
                rms_norm_call(x, norm_1[0], eps, normed),
                *_layer(normed, to_q, q),
                *_layer(normed, to_k, k),
                *_layer(normed, to_v, v),
                _attend(state, b, q, k, v, cos, sin, a3),
                *_layer(a3, proj, a5, skip=x),  # a_1 + a_4
                rms_norm_call(a5, norm_2[0], eps, normed),
                *_layer(normed, to_gate, gate),
                *_layer(normed, to_up, up),
                swiglu_call(gate, up, a8),
                *_layer(a8, down, x, skip=a5),  # a_5 + a_9
            ]
        return calls

    return Decoder(layers[0][0][0].size, cache, start, list_calls)


KERNELS = (
    *linear.KERNELS,
    *layer_norm.KERNELS,
    *rms_norm.KERNELS,
    *activation.KERNELS,
    *swiglu.KERNELS,
    head_forward,
    _attention,
)
