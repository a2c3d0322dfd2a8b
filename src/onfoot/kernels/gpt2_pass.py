"""A whole pass of a small GPT-2 in one: each thread takes its own sequences from tokens to gradients.

Where products are small, what counts are calls, joins, and the way to memory. Here a thread keeps its rows: a chunk of
them goes through several layers while it is in the cache, no thread waits for another, and what is quickly computed
again (norms, activations) is not kept. Every weight is packed once for all chunks. What a thread's rows contribute to
the gradients lies in memory of its own; only then do all threads meet, and a second kernel adds that up.

The names are the paper's: a_1 is the input of a block, a_10 its output, a_12 the logits, Δ_i the gradient with respect
to a_i. The functions of a block are those of `models/gpt2.py`, on some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from onfoot.kernels import attention, layer_norm, linear, small_enough
from onfoot.kernels.activation import gelu_tanh, gelu_tanh_and_slope
from onfoot.kernels.attention_head import backward_floats, forward_floats, head_backward, head_forward
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.layer_norm import BLOCK, norm, norm_again, norm_backward, share_of_parts
from onfoot.kernels.logits_loss import loss_and_gradient
from onfoot.kernels.product import (
    FLOAT,
    LINE,
    ROWS_SCRATCH,
    SCRATCH,
    multiply,
    multiply_packed,
    pack_weight,
    packed_floats,
)
from onfoot.kernels.shapes import FLOAT32, contiguous, fits, round_up, share, threads
from onfoot.kernels.simd import address, floats, matrices, matrix
from onfoot.kernels.update import data
from onfoot.ops.cross_entropy import IGNORE

CHUNK = 96  # rows that go through several layers together; a multiple of every TILE_ROWS and of BLOCK
GRAIN = 1024  # numbers

# The parameters: the tables of tokens and positions, the blocks, the last norm, and the head where it is not tied.
# Weight and bias of each layer in a block:
TOKENS, POSITIONS, BLOCKS, PER_BLOCK = 0, 1, 2, 12
NORM_1, ATTN, PROJ, NORM_2, EXPAND, CONTRACT = range(0, PER_BLOCK, 2)


class Sizes(NamedTuple):
    sequences: int
    tokens: int  # of a sequence
    vocabulary: int
    positions: int
    blocks: int
    heads: int
    c: int  # the width of the stream
    qkv: int  # H (2 d_ρ + d_h)
    a: int  # H d_h
    f: int  # the width inside the MLP


class Kept(NamedTuple):
    """Where a block's activations begin that its backward pass needs, and where they end."""

    a1: int
    qkv: int
    a3: int
    a5: int
    a7: int
    lse: int  # the logarithms of the softmax's normalisers
    norms: int  # mean and 1/σ of both norms, four rows
    end: int


class Passing(NamedTuple):
    """Where everything begins that exists once for all blocks, and where it ends."""

    d7: int
    a8: int
    d5: int
    a6: int
    d3: int
    dqkv: int
    a2: int
    d10: int
    d1: int
    a10: int  # of the last block
    a11: int
    a12: int
    norm: int  # mean and 1/σ of the last norm, two rows
    end: int


class Rows(NamedTuple):
    """What one thread does: its sequences, their rows, and its memory: for products, for a chunk, for what is packed.

    A gradient's product uses all of that memory.
    """

    first: int
    last: int
    begin: int
    end: int
    spare: int
    chunk_c: int
    chunk_f: int
    packed: int


@inner
def bytes_of(numbers: int) -> int:
    """Of that many floats, in whole cache lines."""
    return round_up(numbers, LINE) * FLOAT


@inner
def kept_at(s: Sizes, a1: int) -> Kept:
    """What a block keeps, from an address on."""
    n = s.sequences * s.tokens
    qkv = a1 + bytes_of(n * s.c)
    a3 = qkv + bytes_of(n * s.qkv)
    a5 = a3 + bytes_of(n * s.a)
    a7 = a5 + bytes_of(n * s.c)
    lse = a7 + bytes_of(n * s.f)
    norms = lse + bytes_of(n * s.heads)
    return Kept(a1, qkv, a3, a5, a7, lse, norms, norms + bytes_of(4 * n))


@inner
def passing_at(s: Sizes, d7: int) -> Passing:
    """What passes by, from an address on."""
    n = s.sequences * s.tokens
    by_c, by_f = bytes_of(n * s.c), bytes_of(n * s.f)
    a8 = d7 + by_f
    d5 = a8 + by_f
    a6 = d5 + by_c
    d3 = a6 + by_c
    dqkv = d3 + bytes_of(n * s.a)
    a2 = dqkv + bytes_of(n * s.qkv)
    d10 = a2 + by_c
    d1 = d10 + by_c
    a10 = d1 + by_c
    a11 = a10 + by_c
    a12 = a11 + by_c
    norm = a12 + bytes_of(n * round_up(s.vocabulary, LINE))
    return Passing(d7, a8, d5, a6, d3, dqkv, a2, d10, d1, a10, a11, a12, norm, norm + bytes_of(2 * n))


@inner
def layer(rows: int, depth: int, columns: int, x: int, packed: int, y: int, bias: int, skip: int, work: int) -> None:
    """y = x w + bias + skip, all with contiguous rows."""
    x_row, y_row = depth * FLOAT, columns * FLOAT
    multiply_packed(rows, columns, depth, x, x_row, packed, y, y_row, bias, skip, y_row, work)


@inner
def layer_gradient(rows: int, n_in: int, n_out: int, x: int, dy: int, to: int, work: int) -> None:
    """dw = xᵗ dy, with db = Σ dy as one row more."""
    x_row, y_row = n_in * FLOAT, n_out * FLOAT
    multiply(n_in + 1, n_out, rows, x, FLOAT, x_row, 1, dy, y_row, FLOAT, to, y_row, 0, 0, 0, work)  # eq FC.3, FC.4


@inner
def embed(s: Sizes, r: Rows, tokens: np.ndarray, token_table: int, position_table: int, to: int) -> None:
    """a_1 = a_tok + a_pos."""
    for i in range(r.begin, r.end):
        out = floats(to + i * s.c * FLOAT, s.c)
        token = floats(token_table + tokens[i] * s.c * FLOAT, s.c)
        position = floats(position_table + i % s.tokens * s.c * FLOAT, s.c)
        for j in range(s.c):
            out[j] = token[j] + position[j]  # eq 2


@inner
def embed_backward(s: Sizes, r: Rows, d1: int, tokens: np.ndarray, token_table: int, position_table: int) -> None:
    """Adds Δ_1 to the tables' gradients."""
    for i in range(r.begin, r.end):
        up = floats(d1 + i * s.c * FLOAT, s.c)
        token = floats(token_table + tokens[i] * s.c * FLOAT, s.c)
        position = floats(position_table + i % s.tokens * s.c * FLOAT, s.c)
        for j in range(s.c):
            token[j] += up[j]  # eq 3
            position[j] += up[j]


@inner
def block_forward(s: Sizes, r: Rows, params: np.ndarray, k: Kept, a10: int, eps: float, causal: int) -> None:
    """a_1 -> a_10."""
    c, qkv, a, f, n = s.c, s.qkv, s.a, s.f, s.sequences * s.tokens
    d_k, d_v = (qkv - a) // (2 * s.heads), a // s.heads
    norms = matrix(k.norms, 4, n)
    attn_packed = r.packed
    proj_packed = pack_weight(data(params[ATTN]), qkv * FLOAT, FLOAT, c, qkv, attn_packed)
    expand_packed = pack_weight(data(params[PROJ]), c * FLOAT, FLOAT, a, c, proj_packed)
    contract_packed = pack_weight(data(params[EXPAND]), f * FLOAT, FLOAT, c, f, expand_packed)
    spare_heads = pack_weight(data(params[CONTRACT]), c * FLOAT, FLOAT, f, c, contract_packed)

    weight, bias = floats(data(params[NORM_1]), c), floats(data(params[NORM_1 + 1]), c)
    attn_bias = data(params[ATTN + 1])
    for i in range(r.begin, r.end, CHUNK):
        rows = min(CHUNK, r.end - i)
        a1, a2 = matrix(k.a1 + i * c * FLOAT, rows, c), matrix(r.chunk_c, rows, c)
        norm(a1, weight, bias, eps, a2, norms[0, i : i + rows], norms[1, i : i + rows])
        layer(rows, c, qkv, r.chunk_c, attn_packed, k.qkv + i * qkv * FLOAT, attn_bias, 0, r.spare)

    for i in range(r.first, r.last):
        query = k.qkv + i * s.tokens * qkv * FLOAT
        key, value = query + s.heads * d_k * FLOAT, query + 2 * s.heads * d_k * FLOAT
        a3 = k.a3 + i * s.tokens * a * FLOAT
        for h in range(s.heads):
            head_forward(
                query + h * d_k * FLOAT,
                qkv * FLOAT,
                key + h * d_k * FLOAT,
                qkv * FLOAT,
                value + h * d_v * FLOAT,
                qkv * FLOAT,
                a3 + h * d_v * FLOAT,
                a * FLOAT,
                k.lse + (i * s.heads + h) * s.tokens * FLOAT,
                0,
                s.tokens,
                s.tokens,
                d_k,
                d_v,
                causal,
                spare_heads,
            )

    weight, bias = floats(data(params[NORM_2]), c), floats(data(params[NORM_2 + 1]), c)
    proj_bias, expand_bias, contract_bias = data(params[PROJ + 1]), data(params[EXPAND + 1]), data(params[CONTRACT + 1])
    for i in range(r.begin, r.end, CHUNK):
        rows, by_c = min(CHUNK, r.end - i), i * c * FLOAT
        a5, a6 = matrix(k.a5 + by_c, rows, c), matrix(r.chunk_c, rows, c)
        a7, a8 = floats(k.a7 + i * f * FLOAT, rows * f), floats(r.chunk_f, rows * f)
        layer(rows, a, c, k.a3 + i * a * FLOAT, proj_packed, k.a5 + by_c, proj_bias, k.a1 + by_c, r.spare)  # a_1 + a_4
        norm(a5, weight, bias, eps, a6, norms[2, i : i + rows], norms[3, i : i + rows])
        layer(rows, c, f, r.chunk_c, expand_packed, address(a7), expand_bias, 0, r.spare)
        for j in range(rows * f):
            a8[j] = gelu_tanh(a7[j])
        layer(rows, f, c, r.chunk_f, contract_packed, a10 + by_c, contract_bias, k.a5 + by_c, r.spare)  # a_5 + a_9


@inner
def block_backward(
    s: Sizes, r: Rows, params: np.ndarray, k: Kept, p: Passing, d10: int, d1: int, causal: int, to: int, at: np.ndarray
) -> None:
    """Δ_10 -> Δ_1, and the parameters' gradients, the part of these rows; they begin at `to` + `at` numbers."""
    c, qkv, a, f, n = s.c, s.qkv, s.a, s.f, s.sequences * s.tokens
    d_k, d_v, mine = (qkv - a) // (2 * s.heads), a // s.heads, r.end - r.begin
    norms = matrix(k.norms, 4, n)
    attn_packed = r.packed
    proj_packed = pack_weight(data(params[ATTN]), FLOAT, qkv * FLOAT, qkv, c, attn_packed)
    expand_packed = pack_weight(data(params[PROJ]), FLOAT, c * FLOAT, c, a, proj_packed)
    contract_packed = pack_weight(data(params[EXPAND]), FLOAT, f * FLOAT, f, c, expand_packed)
    spare_parts = pack_weight(data(params[CONTRACT]), FLOAT, c * FLOAT, c, f, contract_packed)
    parts = matrices(spare_parts, (mine + BLOCK - 1) // BLOCK, 2, c)
    spare_heads = spare_parts + parts.size * FLOAT

    weight, bias = floats(data(params[NORM_2]), c), floats(data(params[NORM_2 + 1]), c)
    for i in range(r.begin, r.end, CHUNK):
        rows, by_c = min(CHUNK, r.end - i), i * c * FLOAT
        a5, a6 = matrix(k.a5 + by_c, rows, c), matrix(p.a6 + by_c, rows, c)
        d5, d6, skip = matrix(p.d5 + by_c, rows, c), matrix(r.chunk_c, rows, c), matrix(d10 + by_c, rows, c)
        mean, rstd = norms[2, i : i + rows], norms[3, i : i + rows]
        a7, a8 = floats(k.a7 + i * f * FLOAT, rows * f), floats(p.a8 + i * f * FLOAT, rows * f)
        d7 = floats(p.d7 + i * f * FLOAT, rows * f)
        layer(rows, c, f, d10 + by_c, contract_packed, address(d7), 0, 0, r.spare)  # Δ_8
        for j in range(rows * f):
            a8[j], slope = gelu_tanh_and_slope(a7[j])
            d7[j] *= slope
        layer(rows, f, c, address(d7), expand_packed, r.chunk_c, 0, 0, r.spare)
        norm_again(a5, weight, bias, mean, rstd, a6)
        norm_backward(d6, skip, a5, mean, rstd, weight, d5, parts[(i - r.begin) // BLOCK :])  # eq NET.1
        layer(rows, c, a, address(d5), proj_packed, p.d3 + i * a * FLOAT, 0, 0, r.spare)
    share_of_parts(parts, floats(to + at[NORM_2] * FLOAT, c), floats(to + at[NORM_2 + 1] * FLOAT, c), 0, 1)

    for i in range(r.first, r.last):
        by_qkv, by_a = i * s.tokens * qkv * FLOAT, i * s.tokens * a * FLOAT
        query, dquery = k.qkv + by_qkv, p.dqkv + by_qkv
        key, value = query + s.heads * d_k * FLOAT, query + 2 * s.heads * d_k * FLOAT
        dkey, dvalue = dquery + s.heads * d_k * FLOAT, dquery + 2 * s.heads * d_k * FLOAT
        for h in range(s.heads):
            head_backward(
                p.d3 + by_a + h * d_v * FLOAT,
                a * FLOAT,
                query + h * d_k * FLOAT,
                qkv * FLOAT,
                key + h * d_k * FLOAT,
                qkv * FLOAT,
                value + h * d_v * FLOAT,
                qkv * FLOAT,
                k.a3 + by_a + h * d_v * FLOAT,
                a * FLOAT,
                k.lse + (i * s.heads + h) * s.tokens * FLOAT,
                0,
                dquery + h * d_k * FLOAT,
                qkv * FLOAT,
                dkey + h * d_k * FLOAT,
                qkv * FLOAT,
                dvalue + h * d_v * FLOAT,
                qkv * FLOAT,
                s.tokens,
                s.tokens,
                d_k,
                d_v,
                causal,
                spare_heads,
            )

    weight, bias = floats(data(params[NORM_1]), c), floats(data(params[NORM_1 + 1]), c)
    for i in range(r.begin, r.end, CHUNK):
        rows, by_c = min(CHUNK, r.end - i), i * c * FLOAT
        a1, a2 = matrix(k.a1 + by_c, rows, c), matrix(p.a2 + by_c, rows, c)
        d2, d5 = matrix(r.chunk_c, rows, c), matrix(p.d5 + by_c, rows, c)
        mean, rstd = norms[0, i : i + rows], norms[1, i : i + rows]
        layer(rows, qkv, c, p.dqkv + i * qkv * FLOAT, attn_packed, r.chunk_c, 0, 0, r.spare)
        norm_again(a1, weight, bias, mean, rstd, a2)
        below = matrix(d1 + by_c, rows, c)
        norm_backward(d2, d5, a1, mean, rstd, weight, below, parts[(i - r.begin) // BLOCK :])  # eq NET.2
    share_of_parts(parts, floats(to + at[NORM_1] * FLOAT, c), floats(to + at[NORM_1 + 1] * FLOAT, c), 0, 1)

    by_c, by_f = r.begin * c * FLOAT, r.begin * f * FLOAT
    a3, dqkv = k.a3 + r.begin * a * FLOAT, p.dqkv + r.begin * qkv * FLOAT
    layer_gradient(mine, f, c, p.a8 + by_f, d10 + by_c, to + at[CONTRACT] * FLOAT, r.spare)  # Δ_9 = Δ_10
    layer_gradient(mine, c, f, p.a6 + by_c, p.d7 + by_f, to + at[EXPAND] * FLOAT, r.spare)
    layer_gradient(mine, a, c, a3, p.d5 + by_c, to + at[PROJ] * FLOAT, r.spare)  # Δ_4 = Δ_5
    layer_gradient(mine, c, qkv, p.a2 + by_c, dqkv, to + at[ATTN] * FLOAT, r.spare)
    floats(to + at[ATTN + 1] * FLOAT, qkv)[s.heads * d_k : 2 * s.heads * d_k] = 0  # eq 29: the keys' biases do not act


@inner
def head(
    s: Sizes,
    r: Rows,
    targets: np.ndarray,
    norm_weight: int,
    norm_bias: int,
    table: int,
    eps: float,
    scale: float,
    p: Passing,
    losses: np.ndarray,
    to_weight: int,
    to_bias: int,
    to_table: int,
) -> None:
    """The last a_10 -> each token's loss and Δ_10, and the gradients of the last norm and of the head's table."""
    c, v, n, mine = s.c, s.vocabulary, s.sequences * s.tokens, r.end - r.begin
    c_row, v_row = c * FLOAT, round_up(v, LINE) * FLOAT
    norms = matrix(p.norm, 2, n)
    weight, bias = floats(norm_weight, c), floats(norm_bias, c)
    up_packed = pack_weight(table, FLOAT, c_row, c, v, r.packed)
    spare_parts = pack_weight(table, c_row, FLOAT, v, c, up_packed)
    parts = matrices(spare_parts, (mine + BLOCK - 1) // BLOCK, 2, c)
    for i in range(r.begin, r.end, CHUNK):
        rows = min(CHUNK, r.end - i)
        a10, a11 = matrix(p.a10 + i * c_row, rows, c), matrix(p.a11 + i * c_row, rows, c)
        d11, d10 = matrix(r.chunk_c, rows, c), matrix(p.d10 + i * c_row, rows, c)
        mean, rstd = norms[0, i : i + rows], norms[1, i : i + rows]
        norm(a10, weight, bias, eps, a11, mean, rstd)
        a12 = p.a12 + i * v_row
        multiply_packed(rows, v, c, address(a11), c_row, r.packed, a12, v_row, 0, 0, 0, r.spare)
        for j in range(rows):
            logits, target = floats(a12 + j * v_row, v), targets[i + j]
            losses[i + j] = 0.0
            if target == IGNORE:
                logits[:] = 0
            else:
                losses[i + j] = loss_and_gradient(logits, target, scale)  # eq CE.1, CE.2
        multiply_packed(rows, c, v, a12, v_row, up_packed, address(d11), c_row, 0, 0, 0, r.spare)  # eq FC.2
        norm_backward(d11, d11[:0], a10, mean, rstd, weight, d10, parts[(i - r.begin) // BLOCK :])
    share_of_parts(parts, floats(to_weight, c), floats(to_bias, c), 0, 1)
    a12, a11_rows = p.a12 + r.begin * v_row, p.a11 + r.begin * c_row
    multiply(v, c, mine, a12, FLOAT, v_row, 0, a11_rows, c_row, FLOAT, to_table, c_row, 0, 0, 0, r.spare)  # eq FC.3


@kernel("i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], f8, f4, b1, f4[:,::1], f4[::1], f4[:,::1], f8[::1], f4[:,:]")
def _pass(
    tokens: np.ndarray,
    targets: np.ndarray,
    sizes: np.ndarray,
    params: np.ndarray,
    at: np.ndarray,
    eps: float,
    scale: float,
    causal: bool,
    kept: np.ndarray,
    passing: np.ndarray,
    grads: np.ndarray,
    losses: np.ndarray,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """`params` are arrays (as objects), `at` says where the gradient of each begins in a thread's row of `grads`."""
    s = Sizes(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9]
    )  # fmt: skip
    first, last = share(s.sequences, 1, thread, threads)
    spare = address(work) + thread * work.strides[0]
    chunk_c = spare + ROWS_SCRATCH * FLOAT
    chunk_f = chunk_c + bytes_of(CHUNK * s.c)
    r = Rows(
        first, last, first * s.tokens, last * s.tokens, spare, chunk_c, chunk_f, chunk_f + bytes_of(CHUNK * s.f)
    )  # fmt: skip
    p, see_less = passing_at(s, address(passing)), 1 if causal else 0
    to = address(grads) + thread * grads.strides[0]
    last_norm = BLOCKS + s.blocks * PER_BLOCK
    table = TOKENS if params.size == last_norm + 2 else last_norm + 2
    tokens_at, positions_at = to + at[TOKENS] * FLOAT, to + at[POSITIONS] * FLOAT

    embed(s, r, tokens, data(params[TOKENS]), data(params[POSITIONS]), address(kept))
    for b in range(s.blocks):
        k = kept_at(s, address(kept) + b * kept.strides[0])
        own = params[BLOCKS + b * PER_BLOCK : BLOCKS + (b + 1) * PER_BLOCK]
        block_forward(s, r, own, k, p.a10 if b == s.blocks - 1 else k.a1 + kept.strides[0], eps, see_less)
    floats(tokens_at, s.vocabulary * s.c)[:] = 0
    head(
        s,
        r,
        targets,
        data(params[last_norm]),
        data(params[last_norm + 1]),
        data(params[table]),
        eps,
        scale,
        p,
        losses,
        to + at[last_norm] * FLOAT,
        to + at[last_norm + 1] * FLOAT,
        to + at[table] * FLOAT,
    )
    d10, d1 = p.d10, p.d1
    for b in range(s.blocks - 1, -1, -1):
        k = kept_at(s, address(kept) + b * kept.strides[0])
        begin, end = BLOCKS + b * PER_BLOCK, BLOCKS + (b + 1) * PER_BLOCK
        block_backward(s, r, params[begin:end], k, p, d10, d1, see_less, to, at[begin:end])
        d10, d1 = d1, d10
    floats(positions_at, s.positions * s.c)[:] = 0
    embed_backward(s, r, d10, tokens, tokens_at, positions_at)  # eq TIE.1: tied, the head's part is there already


@kernel("f4[:,::1]")
def _sum(parts: np.ndarray, thread: int, threads: int) -> None:
    """The sum of all rows, in the first."""
    a, e = share(parts.shape[1], GRAIN, thread, threads)
    for k in range(1, parts.shape[0]):
        total, part = parts[0, a:e], parts[k, a:e]
        for i in range(e - a):
            total[i] += part[i]


def gpt2_pass_suits(tokens: np.ndarray, params: Sequence[np.ndarray]) -> bool:
    """Whether the model is small enough for this, and the sequences many enough for all threads."""
    each, sizes = -(-tokens.shape[0] // threads()), [p.size for p in params]
    block, logits = sum(sizes[BLOCKS : BLOCKS + PER_BLOCK]), tokens.size * params[TOKENS].shape[0]
    return (
        10 * tokens.shape[0] >= 9 * each * threads()
        and small_enough(sizes[TOKENS], block, sum(sizes), logits, threads())
        and fits(*params)
        and all(p.flags.c_contiguous for p in params)
        and tokens.view(np.uint64).max() < params[TOKENS].shape[0]
    )


def gpt2_pass(
    tokens: np.ndarray,
    targets: np.ndarray,
    divisor: float,
    params: Sequence[np.ndarray],
    heads: int,
    eps: float,
    causal: bool,
) -> tuple[np.float32, list[np.ndarray]]:
    """The loss, and the gradients of all parameters.

    These are the tables of tokens and positions; of each block weight and bias of ln_1, c_attn, attention's c_proj,
    ln_2, c_fc and the MLP's c_proj; the last norm's; and the head's table, unless it is that of the tokens.
    """
    (vocabulary, c), (_, qkv), (a, _) = params[TOKENS].shape, params[BLOCKS + ATTN].shape, params[BLOCKS + PROJ].shape
    f, blocks = params[BLOCKS + EXPAND].shape[1], (len(params) - BLOCKS) // PER_BLOCK
    (sequences, length), positions = tokens.shape, params[POSITIONS].shape[0]
    s = Sizes(sequences, length, vocabulary, positions, blocks, heads, c, qkv, a, f)
    at, total = _begins(tuple([p.size for p in params]))
    keeps, passes, works = _memory(s, threads())
    parts, losses = empty((threads(), total)), np.empty(tokens.size)
    _pass(
        contiguous(tokens).reshape(-1),
        contiguous(targets).reshape(-1),
        np.array(s),
        np.array([id(p) for p in params]),
        at,
        eps,
        1 / divisor,
        causal,
        empty((blocks, keeps)),
        empty((passes,)),
        parts,
        losses,
        scratch(threads(), works),
    )
    if threads() > 1:
        _sum(parts)
    grads = [np.ndarray(p.shape, FLOAT32, parts, i) for i, p in zip((at * FLOAT).tolist(), params, strict=True)]
    return np.float32(losses.sum() / divisor), grads


@lru_cache(maxsize=8)
def _begins(sizes: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Where the gradient of each parameter begins among all, and how many numbers they have, in whole lines."""
    at = np.cumsum([0, *sizes])
    return at[:-1], round_up(int(at[-1]), LINE)


@lru_cache(maxsize=8)
def _memory(s: Sizes, threads: int) -> tuple[int, int, int]:
    """Floats that each block keeps, that pass by, and that each thread works with."""
    d_k, d_v = (s.qkv - s.a) // (2 * s.heads), s.a // s.heads
    packed = sum(max(packed_floats(s.c, width), packed_floats(width, s.c)) for width in (s.qkv, s.a, s.f, s.f))
    tables = packed_floats(s.c, s.vocabulary) + packed_floats(s.vocabulary, s.c)
    heads = max(forward_floats(s.tokens, d_k, d_v), backward_floats(s.tokens, d_k, d_v))
    parts = (-(-s.sequences // threads) * s.tokens + BLOCK) // BLOCK * 2 * s.c
    chunks = round_up(CHUNK * s.c, LINE) + round_up(CHUNK * s.f, LINE)
    work = max(SCRATCH, ROWS_SCRATCH + chunks + max(packed, tables) + parts + heads)
    return kept_at(s, 0).end // FLOAT, passing_at(s, 0).end // FLOAT, work


KERNELS = (*linear.KERNELS, *layer_norm.KERNELS, *attention.KERNELS, _pass, _sum)
