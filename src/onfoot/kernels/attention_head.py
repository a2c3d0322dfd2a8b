"""One head of attention on one thread, block of queries by block of queries.

The scores of a block exist only in working memory: softmax is applied there, and nothing of it is kept. On the way
back ρ is computed again from q and k. Keys that no query of a block may see are skipped.

`keep` is the head's dropout pattern, a row of keys for each query, or none: ρ ∘ keep then meets v in place of ρ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onfoot.kernels.cpu import TILE_ROWS
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner
from onfoot.kernels.matrix import FLOAT, Matrix, part, transposed
from onfoot.kernels.product import pack_b, put_tile
from onfoot.kernels.shapes import round_up
from onfoot.kernels.simd import TILE_COLUMNS, floats, greatest, integers, keep_apart, tile_of_rows

BLOCK = 96  # queries; a multiple of every TILE_ROWS
FEW = 4  # queries, up to which packing the keys would cost more than it saves
PANEL_ROW = TILE_COLUMNS * FLOAT  # bytes


@inner
def scores_row(n_k: int) -> int:
    """Floats in a row of scores: whole tiles, and room to read one tile further."""
    return round_up(n_k, TILE_COLUMNS) + TILE_ROWS


def forward_floats(n_k: int, d_k: int, d_v: int) -> int:
    """Working memory of the forward pass."""
    width = n_k + TILE_COLUMNS
    return width * d_k + n_k * (d_v + TILE_COLUMNS) + BLOCK * (width + TILE_ROWS) + _small(max(d_k, d_v))


def backward_floats(n_k: int, d_k: int, d_v: int) -> int:
    """Working memory of the backward pass."""
    width = n_k + TILE_COLUMNS
    packed = width * (d_k + d_v) + (n_k + 2 * BLOCK) * (max(d_k, d_v) + TILE_COLUMNS)
    return packed + 2 * BLOCK * (width + TILE_ROWS) + _small(max(d_k, d_v))


def _small(d: int) -> int:
    return TILE_ROWS * (TILE_COLUMNS + d) + 2 * BLOCK + 64


class Mask(NamedTuple):
    """Which keys a query may see: from `start` (the address of one integer per query; 0: from the first) ..."""

    n_q: int
    n_k: int
    start: int
    causal: bool  # ... to its own; otherwise to the last


@inner
def last_key(mask: Mask, i: int) -> int:
    """Behind the last key that query i may see."""
    return max(0, min(mask.n_k, i + 1 + mask.n_k - mask.n_q)) if mask.causal else mask.n_k


@inner
def first_key(mask: Mask, i: int) -> int:
    """The first key that query i may see."""
    return max(0, min(mask.n_k, integers(mask.start, i + 1)[i])) if mask.start else 0


@inner
def times_kept(row: int, keep: int, n: int) -> None:
    """Multiplies n numbers of a row by those of a dropout pattern."""
    keep_apart()
    numbers, kept = floats(row, n), floats(keep, n)
    for j in range(n):
        numbers[j] *= kept[j]


@inner
def block_scores(
    rows: int, depth: int, a: Matrix, b: int, first: int, end: int, edge_end: int, s: Matrix, spare: int
) -> None:
    """s = a bᵗ for the keys first ... end, whole tiles at a time. Row i sees keys up to `edge_end` + i at most."""
    keep_apart()
    whole = rows // TILE_ROWS * TILE_ROWS
    if whole < rows:  # the last rows beside rows of 0, so that a whole tile can be read
        floats(spare, TILE_ROWS * depth)[:] = 0
        for i in range(whole, rows):
            source, target = floats(a.at + i * a.row, depth), floats(spare + (i - whole) * depth * FLOAT, depth)
            for d in range(depth):
                target[d] = source[d]
    for i in range(0, rows, TILE_ROWS):
        at, row = (a.at + i * a.row, a.row) if i < whole else (spare, depth * FLOAT)
        for j in range(first, min(end, edge_end + i + TILE_ROWS), TILE_COLUMNS):
            tile_of_rows(depth, at, row, b + j * depth * FLOAT, part(s, i, j).at, s.row, 0, 0, 0)


@inner
def block_product(
    rows: int, columns: int, depth: int, a: Matrix, b: int, b_panel: int, c: Matrix, add: bool, seen: int, edge: int
) -> None:
    """c = a b, or c += a b, with b packed in panels. A query sees one key more than the one before, the first `seen`.

    What is not seen is 0 in a, and is left out where that spares whole rows of b: for a = ρ (a row is a query, and
    contiguous) the keys behind, for a = ρᵗ (a row is a key) the queries before.
    """
    keep_apart()
    by_query = a.column == FLOAT
    for j in range(0, columns, TILE_COLUMNS):
        panel = b + j // TILE_COLUMNS * b_panel
        for i in range(0, rows, TILE_ROWS):
            to = part(c, i, j)
            first = 0 if by_query else max(0, i - seen + 1)
            end = min(depth, seen + i + TILE_ROWS - 1) if by_query else depth
            added = Matrix(to.at if add else 0, to.row, FLOAT)
            at = panel + first * PANEL_ROW
            put_tile(rows - i, columns - j, end - first, part(a, i, first), at, to, 0, added, edge)


@inner
def head_forward_few(
    q: Matrix, k: Matrix, v: Matrix, y: Matrix, mask: Mask, keep: Matrix, d_k: int, d_v: int, work: int
) -> None:
    """`head_forward` for a few queries, as when a token is generated: keys and values are read once, where they lie."""
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
            times_kept(work, part(keep, i, low).at, row.size)  # eq DO.1
        for j in range(row.size):
            weight = row[j] / total
            value = floats(v.at + (low + j) * v.row, d_v)
            for d in range(d_v):
                out[d] += weight * value[d]


@inner
def first_of_block(mask: Mask, i0: int, rows: int, end: int) -> int:
    """The first key that a block of queries may see, at the begin of a tile."""
    first = end
    for i in range(i0, i0 + rows):
        first = min(first, first_key(mask, i))
    return first // TILE_COLUMNS * TILE_COLUMNS


@inner
def clear_unseen(row: int, first: int, end: int, low: int, high: int) -> None:
    """Writes 0 for the keys of a block that a query does not see: those before `low`, and from `high` on."""
    floats(row + first * FLOAT, max(0, min(low, end) - first))[:] = 0
    floats(row + max(high, first) * FLOAT, max(0, end - max(high, first)))[:] = 0


@inner
def head_forward(
    q: Matrix, k: Matrix, v: Matrix, y: Matrix, mask: Mask, keep: Matrix, d_k: int, d_v: int, work: int
) -> None:
    """y = ρ v."""
    keep_apart()
    n_q, n_k = mask.n_q, mask.n_k
    if n_q <= FEW:
        head_forward_few(q, k, v, y, mask, keep, d_k, d_v, work)
        return
    scale = F(1) / np.sqrt(F(d_k))
    s = Matrix(work, scores_row(n_k) * FLOAT, FLOAT)
    keys = work + BLOCK * s.row
    values = keys + round_up(n_k, TILE_COLUMNS) * d_k * FLOAT
    edge = values + n_k * round_up(d_v, TILE_COLUMNS) * FLOAT
    spare = edge + TILE_ROWS * TILE_COLUMNS * FLOAT
    pack_b(transposed(k), d_k, n_k, keys)  # kᵗ, (Dk, Tk)
    pack_b(v, n_k, d_v, values)  # (Tk, Dv)
    for i0 in range(0, n_q, BLOCK):
        rows = min(BLOCK, n_q - i0)
        end = last_key(mask, i0 + rows - 1)
        first = first_of_block(mask, i0, rows, end)
        edge_end = last_key(mask, i0)
        block_scores(rows, d_k, part(q, i0, 0), keys, first, end, edge_end, s, spare)  # eq 10
        for i in range(rows):
            low, high = first_key(mask, i0 + i), last_key(mask, i0 + i)
            clear_unseen(s.at + i * s.row, first, end, low, high)
            if high <= low:  # a query that sees nothing
                floats(part(s, i, first).at, end - first)[:] = 0
                continue
            at = part(s, i, low).at
            row, top = floats(at, high - low), greatest(at, high - low)
            total = F(0)
            for j in range(row.size):
                weight = exp((row[j] - top) * scale)  # eq 12, 13
                row[j] = weight
                total += weight
            share = F(1) / total
            for j in range(row.size):
                row[j] *= share  # eq 15
            if keep.at:
                times_kept(at, part(keep, i0 + i, low).at, row.size)  # eq DO.1
        out = part(y, i0, 0)
        if end <= first:
            for i in range(rows):
                floats(out.at + i * y.row, d_v)[:] = 0
        else:
            b, panel = values + first * PANEL_ROW, n_k * PANEL_ROW
            block_product(
                rows, d_v, end - first, part(s, 0, first), b, panel, out, False, edge_end - first, edge
            )  # eq 16


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
    """The gradients of q, k and v; with `add`, those of k and v are added to what is there."""
    keep_apart()
    n_q, n_k = mask.n_q, mask.n_k
    scale = F(1) / np.sqrt(F(d_k))
    rho = Matrix(work, scores_row(n_k) * FLOAT, FLOAT)
    dscores = part(rho, BLOCK, 0)
    keys_t = dscores.at + BLOCK * dscores.row
    values_t = keys_t + round_up(n_k, TILE_COLUMNS) * d_k * FLOAT
    keys = values_t + round_up(n_k, TILE_COLUMNS) * d_v * FLOAT
    queries = keys + n_k * round_up(d_k, TILE_COLUMNS) * FLOAT
    ups = queries + BLOCK * round_up(d_k, TILE_COLUMNS) * FLOAT
    edge = ups + BLOCK * round_up(d_v, TILE_COLUMNS) * FLOAT
    spare = edge + TILE_ROWS * TILE_COLUMNS * FLOAT
    pack_b(transposed(k), d_k, n_k, keys_t)  # kᵗ, (Dk, Tk)
    pack_b(transposed(v), d_v, n_k, values_t)  # vᵗ, (Dv, Tk)
    pack_b(k, n_k, d_k, keys)  # (Tk, Dk)
    if not add:
        for j in range(n_k):
            floats(dk.at + j * dk.row, d_k)[:] = 0
            floats(dv.at + j * dv.row, d_v)[:] = 0
    for i0 in range(0, n_q, BLOCK):
        rows = min(BLOCK, n_q - i0)
        end = last_key(mask, i0 + rows - 1)
        first = first_of_block(mask, i0, rows, end)
        if end <= first:
            for i in range(i0, i0 + rows):
                floats(dq.at + i * dq.row, d_k)[:] = 0
            continue
        edge_end = last_key(mask, i0)
        block_scores(rows, d_k, part(q, i0, 0), keys_t, first, end, edge_end, rho, spare)
        block_scores(rows, d_v, part(dy, i0, 0), values_t, first, end, edge_end, dscores, spare)
        for i in range(rows):
            low, high = first_key(mask, i0 + i), last_key(mask, i0 + i)
            high = max(high, low)
            clear_unseen(rho.at + i * rho.row, first, end, low, high)
            clear_unseen(dscores.at + i * rho.row, first, end, low, high)
            weights, ds = floats(part(rho, i, low).at, high - low), floats(part(dscores, i, low).at, high - low)
            if keep.at:
                times_kept(part(dscores, i, low).at, part(keep, i0 + i, low).at, high - low)  # eq DO.2
            if high == low:  # a query that sees nothing
                continue
            top, total, along = greatest(part(rho, i, low).at, high - low), F(0), F(0)
            for j in range(weights.size):
                weight = exp((weights[j] - top) * scale)  # eq 12, 13
                weights[j] = weight
                total += weight
                along += weight * ds[j]
            # (Δ vᵗ) ⊖ ρ from the very numbers it is subtracted from: where they are all alike, little is left
            along = along / total if weights.size > 1 else ds[0]
            share = F(1) / total
            for j in range(weights.size):
                weights[j] *= share  # eq 15
                ds[j] = weights[j] * (ds[j] - along) * scale  # eq 25, 27, 28
            if keep.at:
                times_kept(part(rho, i, low).at, part(keep, i0 + i, low).at, high - low)  # for v's gradient; eq DO.1
        count, seen, panel = end - first, edge_end - first, rows * PANEL_ROW
        pack_b(part(dy, i0, 0), rows, d_v, ups)
        pack_b(part(q, i0, 0), rows, d_k, queries)
        a, to = transposed(part(rho, 0, first)), part(dv, first, 0)
        block_product(count, d_v, rows, a, ups, panel, to, True, seen, edge)  # eq ATT.1
        a, b, to = part(dscores, 0, first), keys + first * PANEL_ROW, part(dq, i0, 0)
        block_product(rows, d_k, count, a, b, n_k * PANEL_ROW, to, False, seen, edge)  # eq ATT.2
        a, to = transposed(a), part(dk, first, 0)
        block_product(count, d_k, rows, a, queries, panel, to, True, seen, edge)  # eq ATT.3
