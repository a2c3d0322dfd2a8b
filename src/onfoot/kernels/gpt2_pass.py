"""A whole pass of a small GPT-2 in one: each thread takes its own sequences from tokens to gradients.

Where products are small, what counts are calls, joins, and the way to memory. Here a thread keeps its rows, and no
thread waits for another. What its rows contribute to the gradients lies in memory of its own; only then do all threads
meet, and a second kernel adds that up. (So how a gradient is rounded depends on the number of threads.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from onfoot.kernels import done_in_one
from onfoot.kernels.attention_head import head_backward, head_forward
from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.cross_entropy import checked_targets
from onfoot.kernels.gpt2_block import ATTN, EXPAND, PER_BLOCK, PROJ, block_backward, block_forward
from onfoot.kernels.gpt2_places import CHUNK, Passing, Rows, Sizes, kept_at, memory, passing_at, rows_of
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.layer_norm import BLOCK, norm, norm_backward, share_of_parts
from onfoot.kernels.logits_loss import loss_and_gradient
from onfoot.kernels.product import FLOAT, LINE, multiply, multiply_packed, pack_weight
from onfoot.kernels.shapes import FLOAT32, contiguous, fits, round_up, share, threads
from onfoot.kernels.simd import address, floats, matrices, matrix
from onfoot.kernels.update import data
from onfoot.ops.cross_entropy import IGNORE

GRAIN = 1024  # numbers

# The parameters: the tables of tokens and positions, the blocks, the last norm, and the head where it is not tied.
TOKENS, POSITIONS, BLOCKS = 0, 1, 2


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
def logits_and_loss(
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
        d11, d10 = matrix(r.chunk, rows, c), matrix(p.d10 + i * c_row, rows, c)
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


@kernel(
    "i8[::1], i8[::1], i8[::1], i8[::1], i8[::1], f8, f4, b1, f4[:,::1], f4[::1], f4[:,::1], f8[::1], f4[:,:]",
    "n, n, ., p, p, , , , . ., ., threads ., n, threads .",
)
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
    r = rows_of(s, first, last, address(work) + thread * work.strides[0])
    p, masked = passing_at(s, address(passing)), 1 if causal else 0
    to = address(grads) + thread * grads.strides[0]
    last_norm = BLOCKS + s.blocks * PER_BLOCK
    table = TOKENS if params.size == last_norm + 2 else last_norm + 2
    tokens_at, positions_at = to + at[TOKENS] * FLOAT, to + at[POSITIONS] * FLOAT

    embed(s, r, tokens, data(params[TOKENS]), data(params[POSITIONS]), address(kept))
    for b in range(s.blocks):
        k = kept_at(s, address(kept) + b * kept.strides[0])
        own = params[BLOCKS + b * PER_BLOCK : BLOCKS + (b + 1) * PER_BLOCK]
        block_forward(s, r, own, k, p.a10 if b == s.blocks - 1 else k.a1 + kept.strides[0], eps, masked)
    floats(tokens_at, s.vocabulary * s.c)[:] = 0
    logits_and_loss(
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
        block_backward(s, r, params[begin:end], k, p, d10, d1, masked, to, at[begin:end])
        d10, d1 = d1, d10
    floats(positions_at, s.positions * s.c)[:] = 0
    embed_backward(s, r, d10, tokens, tokens_at, positions_at)  # eq TIE.1: tied, the head's part is there already


@kernel("f4[:,::1]")
def _sum(parts: np.ndarray, thread: int, threads: int) -> None:
    """The sum of all rows, in the first; `sum_rows` would write one more."""
    a, e = share(parts.shape[1], GRAIN, thread, threads)
    for k in range(1, parts.shape[0]):
        total, part = parts[0, a:e], parts[k, a:e]
        for i in range(e - a):
            total[i] += part[i]


def gpt2_pass_suits(tokens: np.ndarray, params: Sequence[np.ndarray]) -> bool:
    """Whether the model is small enough for this, and the sequences many enough for all threads."""
    if tokens.ndim != 2 or tokens.dtype != np.int64 or params[TOKENS].ndim != 2:
        return False
    (sequences, n), vocabulary = tokens.shape, params[TOKENS].shape[0]
    sizes = [p.size for p in params]
    block = sum(sizes[BLOCKS : BLOCKS + PER_BLOCK])
    return (
        done_in_one(sequences, n, vocabulary, sizes[TOKENS], block, sum(sizes), threads())
        and fits(*params)
        and all(p.flags.c_contiguous for p in params)
        and n <= params[POSITIONS].shape[0]
        and tokens.view(np.uint64).max() < vocabulary
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
    if not fits(*params) or not all(p.flags.c_contiguous for p in params):
        raise TypeError("gpt2_pass: parameters must be contiguous arrays of float32")
    (vocabulary, c), (_, qkv), (a, _) = params[TOKENS].shape, params[BLOCKS + ATTN].shape, params[BLOCKS + PROJ].shape
    f, blocks = params[BLOCKS + EXPAND].shape[1], (len(params) - BLOCKS) // PER_BLOCK
    (sequences, length), positions = tokens.shape, params[POSITIONS].shape[0]
    s = Sizes(sequences, length, vocabulary, positions, blocks, heads, c, qkv, a, f)
    shapes = tuple([p.shape for p in params])
    _check(s, shapes)
    if tokens.dtype != np.int64 or tokens.view(np.uint64).max() >= vocabulary:
        raise IndexError(f"gpt2_pass: tokens must be 64-bit integers in 0 ... {vocabulary - 1}")
    if np.shape(targets) != tokens.shape:
        raise ValueError(f"gpt2_pass: targets have shape {np.shape(targets)}, tokens {tokens.shape}")
    at, total = _begins(shapes)
    on = threads()
    keeps, passes, works = memory(s, on)
    parts, losses = empty((on, total)), np.empty(tokens.size)
    _pass.on(
        on,
        contiguous(tokens).reshape(-1),
        checked_targets(targets, vocabulary),
        np.array(s, np.int64),
        np.array([id(p) for p in params], np.int64),
        at,
        eps,
        1 / divisor,
        causal,
        empty((blocks, keeps)),
        empty((passes,)),
        parts,
        losses,
        scratch(on, works),
    )
    if on > 1:
        _sum(parts)
    grads = [np.ndarray(p.shape, FLOAT32, parts, i) for i, p in zip((at * FLOAT).tolist(), params, strict=True)]
    return np.float32(losses.sum() / divisor), grads


@lru_cache(maxsize=8)
def _check(s: Sizes, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Refuses parameters that do not go together, and more tokens than there are positions."""
    block = [(s.c,)] * 2 + [(s.c, s.qkv), (s.qkv,), (s.a, s.c), (s.c,)] + [(s.c,)] * 2
    block += [(s.c, s.f), (s.f,), (s.f, s.c), (s.c,)]
    wanted = [(s.vocabulary, s.c), (s.positions, s.c), *s.blocks * block, (s.c,), (s.c,), (s.vocabulary, s.c)]
    for i, (found, right) in enumerate(zip(shapes, wanted, strict=False)):
        if found != right:
            raise ValueError(f"gpt2_pass: parameter {i} has shape {found}; the others ask for {right}")
    if len(shapes) not in (len(wanted), len(wanted) - 1):
        raise ValueError(f"gpt2_pass: {len(shapes)} parameters for {s.blocks} blocks; {len(wanted)} are needed")
    if s.tokens > s.positions or s.heads < 1 or s.a % s.heads or (s.qkv - s.a) % (2 * s.heads) or s.qkv <= s.a:
        raise ValueError(f"gpt2_pass: sizes that do not go together: {s}")


@lru_cache(maxsize=8)
def _begins(shapes: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, int]:
    """Where the gradient of each parameter begins among all, and how many numbers they have, in whole lines."""
    at = np.cumsum([0, *map(math.prod, shapes)], dtype=np.int64)
    return at[:-1], round_up(int(at[-1]), LINE)


KERNELS = (multiply, multiply_packed, head_forward, head_backward, _pass, _sum)
