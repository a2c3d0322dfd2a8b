"""One head of attention on one thread, one block of queries at a time.

The scores of a block exist only in working memory: softmax is applied there, and nothing of it is kept. The backward
pass recomputes ρ from q and k. Keys that no query of a block may attend to are skipped.

Scores are stored as sᵗ, (Tk, BLOCK): one row per key, so that `softmax` has one query per lane.

`keep` is the head's dropout pattern, one row of keys per query, or empty: v is then multiplied by ρ ∘ keep instead of
ρ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onfoot.kernels.cpu import TILE_ROWS, WIDTH
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner
from onfoot.kernels.matrix import FLOAT, Matrix, part, transposed
from onfoot.kernels.product import pack_b, put_tile, tile_in_rows
from onfoot.kernels.shapes import round_up
from onfoot.kernels.simd import (
    TILE_COLUMNS,
    floats,
    integers,
    keep_apart,
    load,
    multiply_vector,
    store,
    transpose_square,
)
from onfoot.kernels.softmax import softmax, softmax_backward

BLOCK = 96  # queries; a multiple of every TILE_ROWS and TILE_COLUMNS
FEW = 4  # queries: up to this many, packing costs more than it saves
PANEL_ROW = TILE_COLUMNS * FLOAT  # bytes
SMALL = TILE_ROWS * TILE_COLUMNS + WIDTH * WIDTH + 2 * BLOCK  # floats: a tile, a square, and the bounds of a block


def forward_floats(n_k: int, d_k: int, d_v: int) -> int:
    """Working memory of the forward pass, in floats."""
    keys = n_k + TILE_ROWS
    return keys * (BLOCK + d_v + TILE_COLUMNS) + (BLOCK + TILE_ROWS) * d_k + SMALL


def backward_floats(n_k: int, d_k: int, d_v: int) -> int:
    """Working memory of the backward pass, in floats."""
    keys, wide = n_k + TILE_ROWS, 2 * (d_k + d_v + TILE_COLUMNS)
    return keys * (2 * BLOCK + d_k + TILE_COLUMNS) + BLOCK * wide + TILE_ROWS * max(d_k, d_v) + SMALL


class Mask(NamedTuple):
    """Which keys a query may attend to: from `start` (the address of one integer per query; 0: the first) ..."""

    n_q: int
    n_k: int
    start: int
    causal: bool  # ... to its own; otherwise to the last


class Block(NamedTuple):
    """Some queries, and the keys that any of them attends to."""

    i: int  # the first query
    rows: int
    first: int  # key; a multiple of TILE_ROWS
    end: int
    lows: int  # address of the first key that each query attends to, as floats
    highs: int  # address of the end of its keys


@inner
def last_key(mask: Mask, i: int) -> int:
    """The end of the keys that query i may attend to (exclusive)."""
    return max(0, min(mask.n_k, i + 1 + mask.n_k - mask.n_q)) if mask.causal else mask.n_k


@inner
def first_key(mask: Mask, i: int) -> int:
    """The first key that query i may attend to."""
    return max(0, min(mask.n_k, integers(mask.start, i + 1)[i])) if mask.start else 0


@inner
def block_of(mask: Mask, i0: int, lows: int) -> Block:
    """The block that starts with query i0; its bounds are written to `lows` and after."""
    rows, highs = min(BLOCK, mask.n_q - i0), lows + BLOCK * FLOAT
    first, end = mask.n_k, 0
    for i in range(BLOCK):
        low, high = 0, 0  # lanes beyond the last query attend to nothing
        if i < rows:
            low, high = first_key(mask, i0 + i), last_key(mask, i0 + i)
        if low < high:
            first, end = min(first, low), max(end, high)
        store(lows + i * FLOAT, F(low))
        store(highs + i * FLOAT, F(high))
    first = first // TILE_ROWS * TILE_ROWS
    return Block(i0, rows, first, max(first, end), lows, highs)


@inner
def block_scores(block: Block, mask: Mask, depth: int, a: Matrix, b: int, s: Matrix, spare: int) -> None:
    """s = a bᵗ, for the rows of a that any query of the block attends to; b holds the queries, packed."""
    keep_apart()
    for j in range(block.first, block.end, TILE_ROWS):
        at, row = a.at + j * a.row, a.row
        if j + TILE_ROWS > mask.n_k:  # pads the last rows with 0, so that a full tile can be read
            floats(spare, TILE_ROWS * depth)[:] = 0
            for k in range(j, mask.n_k):
                source, target = floats(a.at + k * a.row, depth), floats(spare + (k - j) * depth * FLOAT, depth)
                for d in range(depth):
                    target[d] = source[d]
            at, row = spare, depth * FLOAT
        for i in range(0, block.rows, TILE_COLUMNS):
            count = min(block.rows - i, TILE_COLUMNS)
            if last_key(mask, block.i + i + count - 1) > j:
                vectors = (count + WIDTH - 1) // WIDTH
                tile_in_rows(vectors, depth, at, row, b + i * depth * FLOAT, part(s, j, i).at, s.row, 0, 0, 0)


@inner
def group_keys(block: Block, i: int) -> tuple[int, int]:
    """The keys (first, end) that the WIDTH queries from i on attend to."""
    first, end = block.end, block.first
    for lane in range(i, i + WIDTH):
        low, high = load(block.lows + lane * FLOAT), load(block.highs + lane * FLOAT)
        if low < high:
            first, end = min(first, int(low)), max(end, int(high))
    return first, max(first, end)


@inner
def clear(s: Matrix, i: int, first: int, end: int) -> None:
    """Writes 0 for WIDTH queries and the keys first ... end."""
    for j in range(first, end):
        floats(part(s, j, i).at, WIDTH)[:] = 0


@inner
def weights(block: Block, s: Matrix, scale: float) -> None:
    """ρᵗ in place of the scores sᵗ: 0 where a query does not attend to a key."""
    keep_apart()
    for i in range(0, block.rows, WIDTH):
        first, end = group_keys(block, i)
        softmax(s.at + i * FLOAT, s.row, first, end, block.lows + i * FLOAT, block.highs + i * FLOAT, scale)
        clear(s, i, block.first, first)
        clear(s, i, end, block.end)


@inner
def score_gradients(block: Block, rho: Matrix, ds: Matrix, scale: float) -> None:
    """dsᵗ in place of dρᵗ."""
    keep_apart()
    for i in range(0, block.rows, WIDTH):
        first, end = group_keys(block, i)
        softmax_backward(rho.at + i * FLOAT, ds.at + i * FLOAT, ds.row, first, end, scale)
        clear(ds, i, block.first, first)
        clear(ds, i, end, block.end)


@inner
def times_kept(block: Block, s: Matrix, keep: Matrix, square: int) -> None:
    """sᵗ ∘ keepᵗ in place, one square of the pattern at a time."""
    keep_apart()
    for i in range(0, block.rows, WIDTH):
        for j in range(block.first, block.end, WIDTH):
            pattern = part(keep, block.i + i, j)
            if i + WIDTH <= block.rows and j + WIDTH <= block.end:
                transpose_square(pattern.at, pattern.row, square, WIDTH * FLOAT)
                for k in range(WIDTH):
                    multiply_vector(square + k * WIDTH * FLOAT, part(s, j + k, i).at)
            else:
                for lane in range(min(WIDTH, block.rows - i)):
                    for k in range(min(WIDTH, block.end - j)):
                        at = part(s, j + k, i + lane).at
                        store(at, load(at) * load(part(pattern, lane, k).at))


@inner
def block_product(
    rows: int, columns: int, depth: int, a: Matrix, b: int, b_panel: int, c: Matrix, add: bool, seen: int, edge: int
) -> None:
    """c = a b, or c += a b, with b packed in panels.

    Causal: the first query attends to `seen` keys, and each next one to one more. Masked entries are 0 in a, and are
    skipped where that saves whole rows of b: for a = ρ (a row is a query) the keys after, for a = ρᵗ (a row is a key,
    and contiguous) the queries before.
    """
    keep_apart()
    by_key = a.column == FLOAT
    for j in range(0, columns, TILE_COLUMNS):
        panel = b + j // TILE_COLUMNS * b_panel
        for i in range(0, rows, TILE_ROWS):
            to = part(c, i, j)
            first = max(0, i - seen + 1) if by_key else 0
            end = depth if by_key else min(depth, seen + i + TILE_ROWS - 1)
            added = Matrix(to.at if add else 0, to.row, FLOAT)
            at = panel + first * PANEL_ROW
            put_tile(rows - i, columns - j, end - first, part(a, i, first), at, to, 0, added, edge)


@inner
def head_forward_few(
    q: Matrix, k: Matrix, v: Matrix, y: Matrix, mask: Mask, keep: Matrix, d_k: int, d_v: int, work: int
) -> None:
    """`head_forward` for a few queries, as in generation: keys and values are read once, without packing."""
    keep_apart()
    scale = F(1) / np.sqrt(F(d_k))
    for i in range(mask.n_q):
        low, high = first_key(mask, i), last_key(mask, i)
        out = floats(y.at + i * y.row, d_v)
        out[:] = 0
        if high <= low:
            continue
        row, query = floats(work, high - low), floats(q.at + i * q.row, d_k)
        top = F(-np.inf)
        for j in range(row.size):
            key = floats(k.at + (low + j) * k.row, d_k)
            total = F(0)
            for d in range(d_k):
                total += query[d] * key[d]
            row[j] = total
            top = max(top, total)
        total = F(0)
        for j in range(row.size):
            weight = exp((row[j] - top) * scale)
            row[j] = weight
            total += weight
        if keep.at:
            kept = floats(part(keep, i, low).at, row.size)
            for j in range(row.size):
                row[j] *= kept[j]  # eq DO.1; `total` is without dropout
        for j in range(row.size):
            weight = row[j] / total
            value = floats(v.at + (low + j) * v.row, d_v)
            for d in range(d_v):
                out[d] += weight * value[d]


@inner
def head_forward(
    q: Matrix, k: Matrix, v: Matrix, y: Matrix, mask: Mask, keep: Matrix, d_k: int, d_v: int, work: int
) -> None:
    """y = ρ v."""
    keep_apart()
    n_k = mask.n_k
    if mask.n_q <= FEW:
        head_forward_few(q, k, v, y, mask, keep, d_k, d_v, work)
        return
    scale = F(1) / np.sqrt(F(d_k))
    s = Matrix(work, BLOCK * FLOAT, FLOAT)  # (Tk, BLOCK)
    queries = s.at + round_up(n_k, TILE_ROWS) * s.row
    values = queries + BLOCK * d_k * FLOAT
    edge = values + n_k * round_up(d_v, TILE_COLUMNS) * FLOAT
    square = edge + TILE_ROWS * TILE_COLUMNS * FLOAT
    bounds = square + WIDTH * WIDTH * FLOAT
    spare = bounds + 2 * BLOCK * FLOAT
    pack_b(v, n_k, d_v, values)  # (Tk, Dv)
    for i0 in range(0, mask.n_q, BLOCK):
        block = block_of(mask, i0, bounds)
        first, count, out = block.first, block.end - block.first, part(y, i0, 0)
        if not count:
            for i in range(block.rows):
                floats(out.at + i * y.row, d_v)[:] = 0
            continue
        pack_b(transposed(part(q, i0, 0)), d_k, block.rows, queries)  # qᵗ, (Dk, BLOCK)
        block_scores(block, mask, d_k, k, queries, s, spare)  # eq 10
        weights(block, s, scale)  # eq 12, 13, 15
        if keep.at:
            times_kept(block, s, keep, square)  # eq DO.1
        a, b, seen = transposed(part(s, first, 0)), values + first * PANEL_ROW, last_key(mask, i0) - first
        block_product(block.rows, d_v, count, a, b, n_k * PANEL_ROW, out, False, seen, edge)  # eq 16


@inner
def head_backward(
    dy: Matrix,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    mask: Mask,
    keep: Matrix,
    dq: Matrix,
    dk: Matrix,
    dv: Matrix,
    d_k: int,
    d_v: int,
    add: bool,
    work: int,
) -> None:
    """The gradients of q, k and v; with `add`, those of k and v are accumulated."""
    keep_apart()
    n_k, wide_k, wide_v = mask.n_k, round_up(d_k, TILE_COLUMNS), round_up(d_v, TILE_COLUMNS)
    scale = F(1) / np.sqrt(F(d_k))
    rho = Matrix(work, BLOCK * FLOAT, FLOAT)  # (Tk, BLOCK)
    ds = part(rho, round_up(n_k, TILE_ROWS), 0)  # (Tk, BLOCK)
    keys = ds.at + round_up(n_k, TILE_ROWS) * ds.row
    queries_t = keys + n_k * wide_k * FLOAT
    ups_t = queries_t + BLOCK * d_k * FLOAT
    queries = ups_t + BLOCK * d_v * FLOAT
    ups = queries + BLOCK * wide_k * FLOAT
    edge = ups + BLOCK * wide_v * FLOAT
    square = edge + TILE_ROWS * TILE_COLUMNS * FLOAT
    bounds = square + WIDTH * WIDTH * FLOAT
    spare = bounds + 2 * BLOCK * FLOAT
    pack_b(k, n_k, d_k, keys)  # (Tk, Dk)
    if not add:
        for j in range(n_k):
            floats(dk.at + j * dk.row, d_k)[:] = 0
            floats(dv.at + j * dv.row, d_v)[:] = 0
    for i0 in range(0, mask.n_q, BLOCK):
        block = block_of(mask, i0, bounds)
        rows, first, count = block.rows, block.first, block.end - block.first
        if not count:
            for i in range(i0, i0 + rows):
                floats(dq.at + i * dq.row, d_k)[:] = 0
            continue
        pack_b(transposed(part(q, i0, 0)), d_k, rows, queries_t)  # qᵗ, (Dk, BLOCK)
        pack_b(transposed(part(dy, i0, 0)), d_v, rows, ups_t)  # Δᵗ, (Dv, BLOCK)
        pack_b(part(q, i0, 0), rows, d_k, queries)
        pack_b(part(dy, i0, 0), rows, d_v, ups)
        block_scores(block, mask, d_k, k, queries_t, rho, spare)
        block_scores(block, mask, d_v, v, ups_t, ds, spare)
        weights(block, rho, scale)
        if keep.at:
            times_kept(block, ds, keep, square)  # eq DO.2
        score_gradients(block, rho, ds, scale)  # eq 25, 27, 28
        if keep.at:
            times_kept(block, rho, keep, square)  # for v's gradient; eq DO.1
        seen, panel = last_key(mask, i0) - first, rows * PANEL_ROW
        to = part(dv, first, 0)
        block_product(count, d_v, rows, part(rho, first, 0), ups, panel, to, True, seen, edge)  # eq ATT.1
        a, b, to = transposed(part(ds, first, 0)), keys + first * PANEL_ROW, part(dq, i0, 0)
        block_product(rows, d_k, count, a, b, n_k * PANEL_ROW, to, False, seen, edge)  # eq ATT.2
        to = part(dk, first, 0)
        block_product(count, d_k, rows, part(ds, first, 0), queries, panel, to, True, seen, edge)  # eq ATT.3
