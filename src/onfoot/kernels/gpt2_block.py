"""A block of a small GPT-2 on one thread's rows: the functions of `models/gpt2.py` without a call or a join.

A chunk of rows goes through several layers while it is in the cache, every weight is packed once for all chunks, and
norms, which are quickly computed again, are not kept.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels.activation import gelu_tanh_and_slope
from onfoot.kernels.attention_head import head_backward, head_forward
from onfoot.kernels.gpt2_places import CHUNK, Kept, Passing, Rows, Sizes
from onfoot.kernels.jit import inner
from onfoot.kernels.layer_norm import BLOCK, norm, norm_again, norm_backward, share_of_parts
from onfoot.kernels.product import FLOAT, multiply, multiply_packed, pack_weight
from onfoot.kernels.simd import address, floats, matrices, matrix
from onfoot.kernels.update import data

# The parameters, weight and bias of each layer:
PER_BLOCK = 12
NORM_1, ATTN, PROJ, NORM_2, EXPAND, CONTRACT = range(0, PER_BLOCK, 2)


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
        a1, a2 = matrix(k.a1 + i * c * FLOAT, rows, c), matrix(r.chunk, rows, c)
        norm(a1, weight, bias, eps, a2, norms[0, i : i + rows], norms[1, i : i + rows])
        layer(rows, c, qkv, r.chunk, attn_packed, k.qkv + i * qkv * FLOAT, attn_bias, 0, r.spare)

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
        a5, a6 = matrix(k.a5 + by_c, rows, c), matrix(r.chunk, rows, c)
        slope, a8 = floats(k.slope + i * f * FLOAT, rows * f), floats(k.a8 + i * f * FLOAT, rows * f)
        layer(rows, a, c, k.a3 + i * a * FLOAT, proj_packed, k.a5 + by_c, proj_bias, k.a1 + by_c, r.spare)  # a_1 + a_4
        norm(a5, weight, bias, eps, a6, norms[2, i : i + rows], norms[3, i : i + rows])
        layer(rows, c, f, r.chunk, expand_packed, address(slope), expand_bias, 0, r.spare)  # a_7
        for j in range(rows * f):
            a8[j], slope[j] = gelu_tanh_and_slope(slope[j])
        layer(rows, f, c, address(a8), contract_packed, a10 + by_c, contract_bias, k.a5 + by_c, r.spare)  # a_5 + a_9


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
        d5, d6, skip = matrix(p.d5 + by_c, rows, c), matrix(r.chunk, rows, c), matrix(d10 + by_c, rows, c)
        mean, rstd = norms[2, i : i + rows], norms[3, i : i + rows]
        slope, d7 = floats(k.slope + i * f * FLOAT, rows * f), floats(p.d7 + i * f * FLOAT, rows * f)
        layer(rows, c, f, d10 + by_c, contract_packed, address(d7), 0, 0, r.spare)  # Δ_8
        for j in range(rows * f):
            d7[j] *= slope[j]
        layer(rows, f, c, address(d7), expand_packed, r.chunk, 0, 0, r.spare)
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
                0,
                spare_heads,
            )

    weight, bias = floats(data(params[NORM_1]), c), floats(data(params[NORM_1 + 1]), c)
    for i in range(r.begin, r.end, CHUNK):
        rows, by_c = min(CHUNK, r.end - i), i * c * FLOAT
        a1, a2 = matrix(k.a1 + by_c, rows, c), matrix(p.a2 + by_c, rows, c)
        d2, d5 = matrix(r.chunk, rows, c), matrix(p.d5 + by_c, rows, c)
        mean, rstd = norms[0, i : i + rows], norms[1, i : i + rows]
        layer(rows, qkv, c, p.dqkv + i * qkv * FLOAT, attn_packed, r.chunk, 0, 0, r.spare)
        norm_again(a1, weight, bias, mean, rstd, a2)
        below = matrix(d1 + by_c, rows, c)
        norm_backward(d2, d5, a1, mean, rstd, weight, below, parts[(i - r.begin) // BLOCK :])  # eq NET.2
    share_of_parts(parts, floats(to + at[NORM_1] * FLOAT, c), floats(to + at[NORM_1 + 1] * FLOAT, c), 0, 1)

    by_c, by_f = r.begin * c * FLOAT, r.begin * f * FLOAT
    a8, a3, dqkv = k.a8 + by_f, k.a3 + r.begin * a * FLOAT, p.dqkv + r.begin * qkv * FLOAT
    layer_gradient(mine, f, c, a8, d10 + by_c, to + at[CONTRACT] * FLOAT, r.spare)  # Δ_9 = Δ_10
    layer_gradient(mine, c, f, p.a6 + by_c, p.d7 + by_f, to + at[EXPAND] * FLOAT, r.spare)
    layer_gradient(mine, a, c, a3, p.d5 + by_c, to + at[PROJ] * FLOAT, r.spare)  # Δ_4 = Δ_5
    layer_gradient(mine, c, qkv, p.a2 + by_c, dqkv, to + at[ATTN] * FLOAT, r.spare)
    floats(to + at[ATTN + 1] * FLOAT, qkv)[s.heads * d_k : 2 * s.heads * d_k] = 0  # eq 29: the keys' biases do not act
