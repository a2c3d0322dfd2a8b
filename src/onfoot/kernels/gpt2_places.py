"""Where everything lies while a small GPT-2's pass is done in one (`gpt2_pass`): activations, error signals, work.

The names are the paper's: a_1 is the input of a block, a_10 its output, a_12 the logits, Δ_i the gradient with respect
to a_i. Places are addresses; every array in them has a row for each token of the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from onfoot.kernels.attention_head import backward_floats, forward_floats
from onfoot.kernels.jit import inner
from onfoot.kernels.layer_norm import BLOCK
from onfoot.kernels.product import FLOAT, LINE, ROWS_SCRATCH, SCRATCH, packed_floats
from onfoot.kernels.shapes import round_up

CHUNK = 96  # rows that go through several layers together; a multiple of every TILE_ROWS and of BLOCK


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
    slope: int  # of the activation at a_7
    a8: int
    lse: int  # the logarithms of the softmax's normalisers
    norms: int  # mean and 1/σ of both norms, four rows
    end: int


class Passing(NamedTuple):
    """Where everything begins that exists once for all blocks, and where it ends."""

    d7: int
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
    chunk: int
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
    slope = a5 + bytes_of(n * s.c)
    a8 = slope + bytes_of(n * s.f)
    lse = a8 + bytes_of(n * s.f)
    norms = lse + bytes_of(n * s.heads)
    return Kept(a1, qkv, a3, a5, slope, a8, lse, norms, norms + bytes_of(4 * n))


@inner
def passing_at(s: Sizes, d7: int) -> Passing:
    """What passes by, from an address on."""
    n = s.sequences * s.tokens
    by_c, by_f = bytes_of(n * s.c), bytes_of(n * s.f)
    d5 = d7 + by_f
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
    return Passing(d7, d5, a6, d3, dqkv, a2, d10, d1, a10, a11, a12, norm, norm + bytes_of(2 * n))


@inner
def rows_of(s: Sizes, first: int, last: int, work: int) -> Rows:
    """A thread's sequences, and its memory from an address on."""
    chunk = work + ROWS_SCRATCH * FLOAT
    return Rows(first, last, first * s.tokens, last * s.tokens, work, chunk, chunk + bytes_of(CHUNK * s.c))


@lru_cache(maxsize=8)
def memory(s: Sizes, threads: int) -> tuple[int, int, int]:
    """Floats that each block keeps, that pass by, and that each thread works with."""
    d_k, d_v = (s.qkv - s.a) // (2 * s.heads), s.a // s.heads
    packed = sum(max(packed_floats(s.c, width), packed_floats(width, s.c)) for width in (s.qkv, s.a, s.f, s.f))
    tables = packed_floats(s.c, s.vocabulary) + packed_floats(s.vocabulary, s.c)
    heads = max(forward_floats(s.tokens, d_k, d_v), backward_floats(s.tokens, d_k, d_v))
    parts = (-(-s.sequences // threads) * s.tokens + BLOCK) // BLOCK * 2 * s.c
    chunk = round_up(CHUNK * s.c, LINE)
    work = max(SCRATCH, ROWS_SCRATCH + chunk + max(packed, tables) + parts + heads)
    return kept_at(s, 0).end // FLOAT, passing_at(s, 0).end // FLOAT, work
