"""One head of attention on one thread, block of queries by block of queries.

The scores of a block exist only in working memory: softmax is applied there, and all that is kept is the logarithm of
each row's normaliser. On the way back ρ is computed again from it. Keys that no query of a block may see are skipped.

Everything is an address or a distance in bytes, as in `product`.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels.cpu import TILE_ROWS
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner, routine
from onfoot.kernels.product import FLOAT, pack_b, put_tile
from onfoot.kernels.shapes import round_up
from onfoot.kernels.simd import TILE_COLUMNS, floats, greatest, integers, keep_apart, load, store, tile_of_rows

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


@inner
def last_key(i: int, n_q: int, n_k: int, causal: int) -> int:
    """Behind the last key that query i may see."""
    return max(0, min(n_k, i + 1 + n_k - n_q)) if causal else n_k


@inner
def first_key(start: int, i: int, n_k: int) -> int:
    """The first key that query i may see."""
    return max(0, min(n_k, integers(start, i + 1)[i])) if start else 0


@inner
def block_scores(
    rows: int,
    a: int,
    a_row: int,
    depth: int,
    b: int,
    first: int,
    end: int,
    edge_end: int,
    s: int,
    s_row: int,
    spare: int,
) -> None:
    """s = a bᵗ for the keys first ... end, whole tiles at a time. Row i sees keys up to `edge_end` + i at most."""
    keep_apart()
    whole = rows // TILE_ROWS * TILE_ROWS
    if whole < rows:  # the last rows beside rows of 0, so that a whole tile can be read
        floats(spare, TILE_ROWS * depth)[:] = 0
        for i in range(whole, rows):
            source, target = floats(a + i * a_row, depth), floats(spare + (i - whole) * depth * FLOAT, depth)
            for d in range(depth):
                target[d] = source[d]
    for i in range(0, rows, TILE_ROWS):
        at, row = (a + i * a_row, a_row) if i < whole else (spare, depth * FLOAT)
        for j in range(first, min(end, edge_end + i + TILE_ROWS), TILE_COLUMNS):
            panel = b + j * depth * FLOAT
            tile_of_rows(depth, at, row, panel, s + i * s_row + j * FLOAT, s_row, 0, 0, 0)


@inner
def block_product(
    rows: int,
    columns: int,
    depth: int,
    in_rows: bool,
    a: int,
    a_stride: int,
    b: int,
    b_panel: int,
    c: int,
    c_row: int,
    add: bool,
    seen: int,
    edge: int,
) -> None:
    """c = a b, or c += a b, with b packed in panels. A query sees one key more than the one before, the first `seen`.

    What is not seen is 0 in a, and is left out where that spares whole rows of b: for a = ρ (`in_rows`: a row is a
    query) the keys behind, for a = ρᵗ (a row is a key) the queries before.
    """
    keep_apart()
    a_row = a_stride if in_rows else FLOAT
    for j in range(0, columns, TILE_COLUMNS):
        panel = b + j // TILE_COLUMNS * b_panel
        for i in range(0, rows, TILE_ROWS):
            at = c + i * c_row + j * FLOAT
            first = 0 if in_rows else max(0, i - seen + 1)
            end = min(depth, seen + i + TILE_ROWS - 1) if in_rows else depth
            put_tile(
                rows - i,
                columns - j,
                end - first,
                in_rows,
                a + i * a_row + first * a_stride,
                a_stride,
                panel + first * PANEL_ROW,
                at,
                c_row,
                0,
                at if add else 0,
                c_row,
                edge,
            )


@inner
def head_forward_few(
    q: int,
    q_row: int,
    k: int,
    k_row: int,
    v: int,
    v_row: int,
    y: int,
    y_row: int,
    lse: int,
    start: int,
    n_q: int,
    n_k: int,
    d_k: int,
    d_v: int,
    causal: int,
    work: int,
) -> None:
    """`head_forward` for a few queries, as when a token is generated: keys and values are read once, where they lie."""
    keep_apart()
    scale = F(1) / np.sqrt(F(d_k))
    for i in range(n_q):
        low, high = first_key(start, i, n_k), last_key(i, n_q, n_k, causal)
        out = floats(y + i * y_row, d_v)
        out[:] = 0
        if high <= low:
            store(lse + i * FLOAT, F(np.inf))
            continue
        row, query = floats(work, high - low), floats(q + i * q_row, d_k)
        top = F(-np.inf)
        for j in range(row.size):
            key = floats(k + (low + j) * k_row, d_k)
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
        store(lse + i * FLOAT, top * scale + np.log(total))
        for j in range(row.size):
            weight = row[j] / total
            value = floats(v + (low + j) * v_row, d_v)
            for d in range(d_v):
                out[d] += weight * value[d]


@routine(16)
def head_forward(
    q: int,
    q_row: int,
    k: int,
    k_row: int,
    v: int,
    v_row: int,
    y: int,
    y_row: int,
    lse: int,
    start: int,
    n_q: int,
    n_k: int,
    d_k: int,
    d_v: int,
    causal: int,
    work: int,
) -> None:
    """y = ρ v and the logarithms of ρ's normalisers."""
    if n_q <= FEW:
        head_forward_few(
            q, q_row, k, k_row, v, v_row, y, y_row, lse, start, n_q, n_k, d_k, d_v, causal, work
        )  # fmt: skip
        return
    scale = F(1) / np.sqrt(F(d_k))
    s_row = scores_row(n_k) * FLOAT
    s = work
    keys = s + BLOCK * s_row
    values = keys + round_up(n_k, TILE_COLUMNS) * d_k * FLOAT
    edge = values + n_k * round_up(d_v, TILE_COLUMNS) * FLOAT
    spare = edge + TILE_ROWS * TILE_COLUMNS * FLOAT
    pack_b(k, FLOAT, k_row, d_k, n_k, keys)  # kᵗ, (Dk, Tk)
    pack_b(v, v_row, FLOAT, n_k, d_v, values)  # (Tk, Dv)
    for i0 in range(0, n_q, BLOCK):
        rows = min(BLOCK, n_q - i0)
        end = last_key(i0 + rows - 1, n_q, n_k, causal)
        first = end
        for i in range(i0, i0 + rows):
            first = min(first, first_key(start, i, n_k))
        first = first // TILE_COLUMNS * TILE_COLUMNS
        edge_end = last_key(i0, n_q, n_k, causal) if causal else n_k
        block_scores(rows, q + i0 * q_row, q_row, d_k, keys, first, end, edge_end, s, s_row, spare)  # eq 10
        for i in range(rows):
            low, high = first_key(start, i0 + i, n_k), last_key(i0 + i, n_q, n_k, causal)
            floats(s + i * s_row + first * FLOAT, max(0, min(low, end) - first))[:] = 0
            floats(s + i * s_row + max(high, first) * FLOAT, max(0, end - max(high, first)))[:] = 0
            if high <= low:  # a query that sees nothing
                floats(s + i * s_row + first * FLOAT, end - first)[:] = 0
                store(lse + (i0 + i) * FLOAT, F(np.inf))
                continue
            row = floats(s + i * s_row + low * FLOAT, high - low)
            top = greatest(s + i * s_row + low * FLOAT, high - low)
            total = F(0)
            for j in range(row.size):
                weight = exp((row[j] - top) * scale)  # eq 12, 13
                row[j] = weight
                total += weight
            store(lse + (i0 + i) * FLOAT, top * scale + np.log(total))
            share = F(1) / total
            for j in range(row.size):
                row[j] *= share  # eq 15
        out = y + i0 * y_row
        if end <= first:
            for i in range(rows):
                floats(out + i * y_row, d_v)[:] = 0
        else:
            a, b, seen = s + first * FLOAT, values + first * PANEL_ROW, edge_end - first
            block_product(
                rows, d_v, end - first, True, a, s_row, b, n_k * PANEL_ROW, out, y_row, False, seen, edge
            )  # eq 16


@routine(23)
def head_backward(
    dy: int,
    dy_row: int,
    q: int,
    q_row: int,
    k: int,
    k_row: int,
    v: int,
    v_row: int,
    lse: int,
    start: int,
    dq: int,
    dq_row: int,
    dk: int,
    dk_row: int,
    dv: int,
    dv_row: int,
    n_q: int,
    n_k: int,
    d_k: int,
    d_v: int,
    causal: int,
    add: int,
    work: int,
) -> None:
    """The gradients of q, k and v; with `add`, those of k and v are added to what is there."""
    scale = F(1) / np.sqrt(F(d_k))
    s_row = scores_row(n_k) * FLOAT
    rho = work
    dscores = rho + BLOCK * s_row
    keys_t = dscores + BLOCK * s_row
    values_t = keys_t + round_up(n_k, TILE_COLUMNS) * d_k * FLOAT
    keys = values_t + round_up(n_k, TILE_COLUMNS) * d_v * FLOAT
    queries = keys + n_k * round_up(d_k, TILE_COLUMNS) * FLOAT
    ups = queries + BLOCK * round_up(d_k, TILE_COLUMNS) * FLOAT
    edge = ups + BLOCK * round_up(d_v, TILE_COLUMNS) * FLOAT
    spare = edge + TILE_ROWS * TILE_COLUMNS * FLOAT
    pack_b(k, FLOAT, k_row, d_k, n_k, keys_t)  # kᵗ, (Dk, Tk)
    pack_b(v, FLOAT, v_row, d_v, n_k, values_t)  # vᵗ, (Dv, Tk)
    pack_b(k, k_row, FLOAT, n_k, d_k, keys)  # (Tk, Dk)
    if not add:
        for j in range(n_k):
            floats(dk + j * dk_row, d_k)[:] = 0
            floats(dv + j * dv_row, d_v)[:] = 0
    for i0 in range(0, n_q, BLOCK):
        rows = min(BLOCK, n_q - i0)
        end = last_key(i0 + rows - 1, n_q, n_k, causal)
        first = end
        for i in range(i0, i0 + rows):
            first = min(first, first_key(start, i, n_k))
        first = first // TILE_COLUMNS * TILE_COLUMNS
        if end <= first:
            for i in range(i0, i0 + rows):
                floats(dq + i * dq_row, d_k)[:] = 0
            continue
        edge_end = last_key(i0, n_q, n_k, causal) if causal else n_k
        block_scores(rows, q + i0 * q_row, q_row, d_k, keys_t, first, end, edge_end, rho, s_row, spare)
        block_scores(rows, dy + i0 * dy_row, dy_row, d_v, values_t, first, end, edge_end, dscores, s_row, spare)
        for i in range(rows):
            low, high = first_key(start, i0 + i, n_k), last_key(i0 + i, n_q, n_k, causal)
            high = max(high, low)
            for at in (rho, dscores):
                floats(at + i * s_row + first * FLOAT, max(0, min(low, end) - first))[:] = 0
                floats(at + i * s_row + max(high, first) * FLOAT, max(0, end - max(high, first)))[:] = 0
            weights = floats(rho + i * s_row + low * FLOAT, high - low)
            ds = floats(dscores + i * s_row + low * FLOAT, high - low)
            normaliser = load(lse + (i0 + i) * FLOAT)
            total, along = F(0), F(0)
            for j in range(weights.size):
                weight = exp(weights[j] * scale - normaliser)
                weights[j] = weight
                total += weight
                along += weight * ds[j]
            # (Δ vᵗ) ⊖ ρ from the very numbers it is subtracted from: where they are all alike, little is left
            along = along / total if weights.size > 1 else ds[0] if weights.size else along
            for j in range(weights.size):
                ds[j] = weights[j] * (ds[j] - along) * scale  # eq 25, 27, 28
        keys_seen, seen = end - first, edge_end - first
        pack_b(dy + i0 * dy_row, dy_row, FLOAT, rows, d_v, ups)
        pack_b(q + i0 * q_row, q_row, FLOAT, rows, d_k, queries)
        a = rho + first * FLOAT
        to = dv + first * dv_row
        block_product(
            keys_seen, d_v, rows, False, a, s_row, ups, rows * PANEL_ROW, to, dv_row, True, seen, edge
        )  # eq ATT.1
        a = dscores + first * FLOAT
        to, b = dq + i0 * dq_row, keys + first * PANEL_ROW
        block_product(
            rows, d_k, keys_seen, True, a, s_row, b, n_k * PANEL_ROW, to, dq_row, False, seen, edge
        )  # eq ATT.2
        to = dk + first * dk_row
        block_product(  # eq ATT.3
            keys_seen, d_k, rows, False, a, s_row, queries, rows * PANEL_ROW, to, dk_row, True, seen, edge
        )
