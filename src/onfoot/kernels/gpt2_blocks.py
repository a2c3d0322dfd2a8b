"""All blocks of a small GPT-2 in one: each thread takes its own sequences all the way through.

Where products are small, what counts are calls, joins, and the way to memory. Here a thread keeps its rows: a chunk of
them goes through several layers while it is in the cache, no thread waits for another before the last block's end, and
what is quickly computed again (norms, activations) is not kept. Every weight is packed once for all chunks. On the way
back each block is two calls: the error signal, row by row, and the gradients of the parameters, for which every thread
needs all rows.

The names are the paper's: a_1 is the input of a block, a_10 its output, Δ_i the gradient with respect to a_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onfoot.kernels import IN_ONE, attention, layer_norm, linear
from onfoot.kernels.activation import gelu_tanh, gelu_tanh_slope
from onfoot.kernels.attention_head import backward_floats, forward_floats, head_backward, head_forward
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.layer_norm import BLOCK, norm, norm_again, norm_backward, share_of_parts
from onfoot.kernels.product import (
    FLOAT,
    LINE,
    ROWS_SCRATCH,
    SCRATCH,
    multiply_packed,
    pack_weight,
    packed_floats,
    share_of_product,
)
from onfoot.kernels.shapes import as_rows, fits, round_up, share, threads
from onfoot.kernels.simd import address, floats, matrix
from onfoot.kernels.update import data

CHUNK = 96  # rows that go through several layers together; a multiple of every TILE_ROWS and of BLOCK


# A block's parameters, weight and bias of each layer in this order, and so the columns of a table of their places.
NORM_1, ATTN, PROJ, NORM_2, EXPAND, CONTRACT = range(0, 12, 2)


class Sizes(NamedTuple):
    n: int  # rows: tokens of all sequences
    c: int  # the width of the stream
    qkv: int  # H (2 d_ρ + d_h)
    a: int  # H d_h
    f: int  # the width inside the MLP
    heads: int
    tokens: int  # of a sequence


class Saved(NamedTuple):
    x: np.ndarray  # (N, C)
    params: Sequence[np.ndarray]
    kept: np.ndarray  # (blocks, numbers)
    sizes: Sizes
    causal: bool


@inner
def kept_places(n: int, c: int, qkv: int, a: int, f: int, heads: int) -> tuple[int, int, int, int, int, int, int]:
    """Behind a_1, where q | k | v, a_3, a_5, a_7, the softmax's normalisers and the norms' numbers begin; the end."""
    at_qkv = round_up(n * c, LINE)
    at_a3 = at_qkv + round_up(n * qkv, LINE)
    at_a5 = at_a3 + round_up(n * a, LINE)
    at_a7 = at_a5 + round_up(n * c, LINE)
    at_lse = at_a7 + round_up(n * f, LINE)
    at_norms = at_lse + round_up(n * heads, LINE)
    return at_qkv, at_a3, at_a5, at_a7, at_lse, at_norms, at_norms + round_up(4 * n, LINE)


@inner
def error_places(n: int, c: int, qkv: int, a: int, f: int) -> tuple[int, int, int, int, int, int, int]:
    """Behind Δ_7, where a_8, Δ_5, a_6, Δ_3, the gradient of q | k | v and a_2 begin; the end."""
    at_a8 = round_up(n * f, LINE)
    at_d5 = at_a8 + round_up(n * f, LINE)
    at_a6 = at_d5 + round_up(n * c, LINE)
    at_d3 = at_a6 + round_up(n * c, LINE)
    at_dqkv = at_d3 + round_up(n * a, LINE)
    at_a2 = at_dqkv + round_up(n * qkv, LINE)
    return at_a8, at_d5, at_a6, at_d3, at_dqkv, at_a2, at_a2 + n * c


@inner
def layer(rows: int, depth: int, columns: int, x: int, packed: int, y: int, bias: int, skip: int, work: int) -> None:
    """y = x w + bias + skip, all with contiguous rows."""
    x_row, y_row = depth * FLOAT, columns * FLOAT
    multiply_packed(rows, columns, depth, x, x_row, packed, y, y_row, bias, skip, y_row, work)


@kernel("f4[:,::1], i8[:,::1], f4[:,::1], f4[:,::1], f8, i8, i8, i8, i8, i8, b1, f4[:,:]")
def _forward(
    x: np.ndarray,
    places: np.ndarray,
    kept: np.ndarray,
    y: np.ndarray,
    eps: float,
    qkv: int,
    a: int,
    f: int,
    heads: int,
    tokens: int,
    causal: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    n, c = x.shape
    blocks = places.shape[0]
    d_k, d_v = (qkv - a) // (2 * heads), a // heads
    first, last = share(n // tokens, 1, thread, threads)
    begin, end = first * tokens, last * tokens
    place = kept_places(n, c, qkv, a, f, heads)
    spare = address(work) + thread * work.strides[0]
    chunk_c = spare + ROWS_SCRATCH * FLOAT  # a_2 or a_6 of a chunk
    chunk_f = chunk_c + CHUNK * c * FLOAT  # a_8 of a chunk
    attn_packed = chunk_f + CHUNK * f * FLOAT
    for b in range(blocks):
        at = address(kept) + b * kept.strides[0]
        at_a1, at_a10 = address(x) if b == 0 else at, address(y) if b == blocks - 1 else at + kept.strides[0]
        at_qkv, at_a3, at_a5 = at + place[0] * FLOAT, at + place[1] * FLOAT, at + place[2] * FLOAT
        at_a7, at_lse, norms = at + place[3] * FLOAT, at + place[4] * FLOAT, matrix(at + place[5] * FLOAT, 4, n)
        proj_packed = pack_weight(data(places[b, ATTN]), qkv * FLOAT, FLOAT, c, qkv, attn_packed)
        expand_packed = pack_weight(data(places[b, PROJ]), c * FLOAT, FLOAT, a, c, proj_packed)
        contract_packed = pack_weight(data(places[b, EXPAND]), f * FLOAT, FLOAT, c, f, expand_packed)
        spare_heads = pack_weight(data(places[b, CONTRACT]), c * FLOAT, FLOAT, f, c, contract_packed)

        weight, bias = floats(data(places[b, NORM_1]), c), floats(data(places[b, NORM_1 + 1]), c)
        attn_bias = data(places[b, ATTN + 1])
        for i in range(begin, end, CHUNK):
            rows = min(CHUNK, end - i)
            a1, a2 = matrix(at_a1 + i * c * FLOAT, rows, c), matrix(chunk_c, rows, c)
            norm(a1, weight, bias, eps, a2, norms[0, i : i + rows], norms[1, i : i + rows])
            layer(rows, c, qkv, chunk_c, attn_packed, at_qkv + i * qkv * FLOAT, attn_bias, 0, spare)

        for s in range(first, last):
            q = at_qkv + s * tokens * qkv * FLOAT
            k, v, a3 = q + heads * d_k * FLOAT, q + 2 * heads * d_k * FLOAT, at_a3 + s * tokens * a * FLOAT
            for h in range(heads):
                head_forward(
                    q + h * d_k * FLOAT,
                    qkv * FLOAT,
                    k + h * d_k * FLOAT,
                    qkv * FLOAT,
                    v + h * d_v * FLOAT,
                    qkv * FLOAT,
                    a3 + h * d_v * FLOAT,
                    a * FLOAT,
                    at_lse + (s * heads + h) * tokens * FLOAT,
                    0,
                    tokens,
                    tokens,
                    d_k,
                    d_v,
                    1 if causal else 0,
                    spare_heads,
                )

        weight, bias = floats(data(places[b, NORM_2]), c), floats(data(places[b, NORM_2 + 1]), c)
        proj_bias, expand_bias = data(places[b, PROJ + 1]), data(places[b, EXPAND + 1])
        contract_bias = data(places[b, CONTRACT + 1])
        for i in range(begin, end, CHUNK):
            rows, by_c = min(CHUNK, end - i), i * c * FLOAT
            a5, a6 = matrix(at_a5 + by_c, rows, c), matrix(chunk_c, rows, c)
            a7, a8 = floats(at_a7 + i * f * FLOAT, rows * f), floats(chunk_f, rows * f)
            a3 = at_a3 + i * a * FLOAT
            layer(rows, a, c, a3, proj_packed, at_a5 + by_c, proj_bias, at_a1 + by_c, spare)  # a_1 + a_4
            norm(a5, weight, bias, eps, a6, norms[2, i : i + rows], norms[3, i : i + rows])
            layer(rows, c, f, chunk_c, expand_packed, address(a7), expand_bias, 0, spare)
            for j in range(rows * f):
                a8[j] = gelu_tanh(a7[j])
            layer(rows, f, c, chunk_f, contract_packed, at_a10 + by_c, contract_bias, at_a5 + by_c, spare)  # a_5 + a_9


@kernel(
    "f4[:,::1], f4[:,::1], i8[:,::1], i8, f4[:,::1], f4[::1], f4[:,:,:,::1], f4[:,::1], i8, i8, i8, i8, i8, b1, f4[:,:]"
)
def _backward(
    d10: np.ndarray,
    x: np.ndarray,
    places: np.ndarray,
    b: int,
    kept: np.ndarray,
    errors: np.ndarray,
    parts: np.ndarray,
    d1: np.ndarray,
    qkv: int,
    a: int,
    f: int,
    heads: int,
    tokens: int,
    causal: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """Δ_10 -> Δ_1 of block b, and what `_gradients` needs."""
    n, c = x.shape
    d_k, d_v = (qkv - a) // (2 * heads), a // heads
    first, last = share(n // tokens, 1, thread, threads)
    begin, end = first * tokens, last * tokens
    place = kept_places(n, c, qkv, a, f, heads)
    at = address(kept) + b * kept.strides[0]
    at_a1 = address(x) if b == 0 else at
    at_qkv, at_a3, at_a5 = at + place[0] * FLOAT, at + place[1] * FLOAT, at + place[2] * FLOAT
    at_a7, at_lse, norms = at + place[3] * FLOAT, at + place[4] * FLOAT, matrix(at + place[5] * FLOAT, 4, n)
    error = error_places(n, c, qkv, a, f)
    at_d7 = address(errors)
    at_a8, at_d5, at_a6 = at_d7 + error[0] * FLOAT, at_d7 + error[1] * FLOAT, at_d7 + error[2] * FLOAT
    at_d3, at_dqkv, at_a2 = at_d7 + error[3] * FLOAT, at_d7 + error[4] * FLOAT, at_d7 + error[5] * FLOAT

    spare = address(work) + thread * work.strides[0]
    chunk_c = spare + ROWS_SCRATCH * FLOAT  # Δ_6 or Δ_2 of a chunk
    attn_packed = chunk_c + CHUNK * c * FLOAT
    proj_packed = pack_weight(data(places[b, ATTN]), FLOAT, qkv * FLOAT, qkv, c, attn_packed)
    expand_packed = pack_weight(data(places[b, PROJ]), FLOAT, c * FLOAT, c, a, proj_packed)
    contract_packed = pack_weight(data(places[b, EXPAND]), FLOAT, f * FLOAT, f, c, expand_packed)
    spare_heads = pack_weight(data(places[b, CONTRACT]), FLOAT, c * FLOAT, c, f, contract_packed)

    own = begin // BLOCK + thread  # so that no thread's parts meet another's
    parts[:, own : end // BLOCK + thread + 1] = 0
    weight, bias = floats(data(places[b, NORM_2]), c), floats(data(places[b, NORM_2 + 1]), c)
    for i in range(begin, end, CHUNK):
        rows, by_c = min(CHUNK, end - i), i * c * FLOAT
        a5, a6 = matrix(at_a5 + by_c, rows, c), matrix(at_a6 + by_c, rows, c)
        d5, d6, skip = matrix(at_d5 + by_c, rows, c), matrix(chunk_c, rows, c), d10[i : i + rows]
        mean, rstd = norms[2, i : i + rows], norms[3, i : i + rows]
        a7, a8 = floats(at_a7 + i * f * FLOAT, rows * f), floats(at_a8 + i * f * FLOAT, rows * f)
        d7 = floats(at_d7 + i * f * FLOAT, rows * f)
        layer(rows, c, f, address(skip), contract_packed, address(d7), 0, 0, spare)  # Δ_8
        for j in range(rows * f):
            a8[j] = gelu_tanh(a7[j])
            d7[j] *= gelu_tanh_slope(a7[j])
        layer(rows, f, c, address(d7), expand_packed, chunk_c, 0, 0, spare)
        norm_again(a5, weight, bias, mean, rstd, a6)
        norm_backward(d6, skip, a5, mean, rstd, weight, d5, parts[1, own + (i - begin) // BLOCK :])  # eq NET.1
        layer(rows, c, a, address(d5), proj_packed, at_d3 + i * a * FLOAT, 0, 0, spare)

    for s in range(first, last):
        q, dq = at_qkv + s * tokens * qkv * FLOAT, at_dqkv + s * tokens * qkv * FLOAT
        k, v = q + heads * d_k * FLOAT, q + 2 * heads * d_k * FLOAT
        dk, dv = dq + heads * d_k * FLOAT, dq + 2 * heads * d_k * FLOAT
        d3, a3 = at_d3 + s * tokens * a * FLOAT, at_a3 + s * tokens * a * FLOAT
        for h in range(heads):
            head_backward(
                d3 + h * d_v * FLOAT,
                a * FLOAT,
                q + h * d_k * FLOAT,
                qkv * FLOAT,
                k + h * d_k * FLOAT,
                qkv * FLOAT,
                v + h * d_v * FLOAT,
                qkv * FLOAT,
                a3 + h * d_v * FLOAT,
                a * FLOAT,
                at_lse + (s * heads + h) * tokens * FLOAT,
                0,
                dq + h * d_k * FLOAT,
                qkv * FLOAT,
                dk + h * d_k * FLOAT,
                qkv * FLOAT,
                dv + h * d_v * FLOAT,
                qkv * FLOAT,
                tokens,
                tokens,
                d_k,
                d_v,
                1 if causal else 0,
                spare_heads,
            )

    weight, bias = floats(data(places[b, NORM_1]), c), floats(data(places[b, NORM_1 + 1]), c)
    for i in range(begin, end, CHUNK):
        rows, by_c = min(CHUNK, end - i), i * c * FLOAT
        a1, a2 = matrix(at_a1 + by_c, rows, c), matrix(at_a2 + by_c, rows, c)
        d2, d5 = matrix(chunk_c, rows, c), matrix(at_d5 + by_c, rows, c)
        mean, rstd = norms[0, i : i + rows], norms[1, i : i + rows]
        layer(rows, qkv, c, at_dqkv + i * qkv * FLOAT, attn_packed, chunk_c, 0, 0, spare)
        norm_again(a1, weight, bias, mean, rstd, a2)
        to, part = d1[i : i + rows], parts[0, own + (i - begin) // BLOCK :]
        norm_backward(d2, d5, a1, mean, rstd, weight, to, part)  # eq NET.2


@inner
def share_of_layer(
    n: int, rows: int, columns: int, x: int, dy: int, to: int, work: np.ndarray, thread: int, threads: int
) -> None:
    """One thread's part of a linear layer's dw = xᵗ dy, with db = Σ dy as one row more."""
    left, right, both = matrix(x, n, rows), matrix(dy, n, columns), matrix(to, rows + 1, columns)
    share_of_product(left.T, right, both, both[0, :0], right[:0], False, work, thread, threads)  # eq FC.3, FC.4


@kernel("f4[:,::1], f4[:,::1], i8, f4[::1], f4[:,:,:,::1], i8[::1], i8, i8, i8, i8, f4[:,:]")
def _gradients(
    d10: np.ndarray,
    kept: np.ndarray,
    b: int,
    errors: np.ndarray,
    parts: np.ndarray,
    grads: np.ndarray,
    qkv: int,
    a: int,
    f: int,
    heads: int,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """The gradients of block b's parameters, into arrays of their shapes; a layer's bias follows its weight."""
    n, c = d10.shape
    a3 = address(kept) + b * kept.strides[0] + kept_places(n, c, qkv, a, f, heads)[1] * FLOAT
    error = error_places(n, c, qkv, a, f)
    d7 = address(errors)
    a8, d5, a6 = d7 + error[0] * FLOAT, d7 + error[1] * FLOAT, d7 + error[2] * FLOAT
    dqkv, a2 = d7 + error[4] * FLOAT, d7 + error[5] * FLOAT
    share_of_layer(n, f, c, a8, address(d10), data(grads[CONTRACT]), work, thread, threads)  # Δ_9 = Δ_10
    share_of_layer(n, c, f, a6, d7, data(grads[EXPAND]), work, thread, threads)
    share_of_layer(n, a, c, a3, d5, data(grads[PROJ]), work, thread, threads)  # Δ_4 = Δ_5
    share_of_layer(n, c, qkv, a2, dqkv, data(grads[ATTN]), work, thread, threads)
    for k, at in ((0, NORM_1), (1, NORM_2)):
        share_of_parts(parts[k], floats(data(grads[at]), c), floats(data(grads[at + 1]), c), thread, threads)


def gpt2_blocks_suit(x: np.ndarray, params: Sequence[np.ndarray]) -> bool:
    """Whether the blocks are small enough for this, and the sequences many enough for all threads."""
    each = -(-x.shape[0] // threads())
    return (
        10 * x.shape[0] >= 9 * each * threads()
        and sum(p.size for p in params[:12]) <= IN_ONE  # each thread packs the weights for itself
        and fits(x, *params)
        and all(p.flags.c_contiguous for p in params)
    )


def gpt2_blocks_forward(
    x: np.ndarray, params: Sequence[np.ndarray], heads: int, eps: float, causal: bool
) -> tuple[np.ndarray, Saved]:
    """The first block's a_1 -> the last one's a_10, (B, T, C).

    Of each block, the parameters are weight and bias of ln_1, c_attn, attention's c_proj, ln_2, c_fc, the MLP's c_proj.
    """
    rows, y = as_rows(x), empty(x.shape)
    qkv, a, f = params[ATTN].shape[1], params[PROJ].shape[0], params[EXPAND].shape[1]
    (n, c), tokens = rows.shape, x.shape[1]
    sizes = Sizes(n, c, qkv, a, f, heads, tokens)
    kept = empty((len(params) // 12, kept_places(n, c, qkv, a, f, heads)[-1]))
    heads_work = forward_floats(tokens, (qkv - a) // (2 * heads), a // heads)
    work = scratch(threads(), ROWS_SCRATCH + CHUNK * (c + f) + _packed(sizes) + heads_work)
    _forward(rows, _places(params).reshape(-1, 12), kept, as_rows(y), eps, qkv, a, f, heads, tokens, causal, work)
    return y, Saved(rows, params, kept, sizes, causal)


def gpt2_blocks_backward(dy: np.ndarray, saved: Saved) -> tuple[np.ndarray, list[np.ndarray]]:
    """The gradients of x and of the parameters."""
    x, params, kept, sizes, causal = saved
    n, c, qkv, a, f, heads, tokens = sizes
    errors, parts = empty((error_places(n, c, qkv, a, f)[-1],)), empty((2, n // BLOCK + threads(), 2, c))
    heads_work = backward_floats(tokens, (qkv - a) // (2 * heads), a // heads)
    work = scratch(threads(), max(SCRATCH, ROWS_SCRATCH + CHUNK * c + _packed(sizes) + heads_work))
    places, grads = _places(params).reshape(-1, 12), _like(params)
    to = _places(grads).reshape(-1, 12)
    d10, d1, spare = as_rows(dy), empty((n, c)), empty((n, c))
    for b in reversed(range(len(places))):
        _backward(d10, x, places, b, kept, errors, parts, d1, qkv, a, f, heads, tokens, causal, work)
        _gradients(d10, kept, b, errors, parts, to[b], qkv, a, f, heads, work)
        d10, d1, spare = d1, spare, d1
    return d10.reshape(dy.shape), grads


def _packed(sizes: Sizes) -> int:
    """Floats in a block's packed weights, either way round."""
    _, c, qkv, a, f, _, _ = sizes
    return sum(max(packed_floats(c, width), packed_floats(width, c)) for width in (qkv, a, f, f))


def _like(params: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays of the parameters' shapes, in which every layer's bias follows its weight."""
    made = []
    for weight in params[::2]:
        if weight.ndim == 1:
            made += [empty(weight.shape), empty(weight.shape)]
        else:
            both = empty((weight.shape[0] + 1, weight.shape[1]))
            made += [both[:-1], both[-1]]
    return made


def _places(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Where the arrays are, as objects."""
    return np.array([id(x) for x in arrays])


KERNELS = (*linear.KERNELS, *layer_norm.KERNELS, *attention.KERNELS, _forward, _backward, _gradients)
