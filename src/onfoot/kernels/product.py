"""The matrix product that all kernels share, c = a b, on one pool of threads.

b is packed panel by panel in the order in which the register tile reads it (transposed if needed, so that a transposed
weight costs nothing); a is read without packing if its rows are contiguous. An entry of c is always the sum of the same
blocks in the same order, for any number of threads.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.cpu import TILE_ROWS, TILE_VECTORS, WIDTH
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.matrix import FLOAT, Matrix, matrix, part
from onfoot.kernels.shapes import round_up, thread_range, threads
from onfoot.kernels.simd import (
    TILE_COLUMNS,
    address,
    column_tile_1,
    column_tile_2,
    copy_vector,
    keep_apart,
    load,
    row_tile_1,
    row_tile_2,
    store,
    tile_of_columns,
    tile_of_rows,
    transpose_square,
)

DEPTH = 384  # a panel of b, DEPTH × TILE_COLUMNS, stays in the L1 cache
ROWS = 72  # a block of a, ROWS × DEPTH, stays in L2; a multiple of every TILE_ROWS
COLUMNS = 1536  # a block of b, DEPTH × COLUMNS, stays in L3; a multiple of every TILE_COLUMNS
RUN = 8  # rows packed together: few streams to read, and full cache lines to write
ROW_COPIES = (TILE_ROWS + WIDTH - 1) // WIDTH  # vectors that cover a column of a's panel
assert ROW_COPIES * WIDTH <= 2 * TILE_ROWS  # the excess stays within the panel's next column
LINE = 16  # floats per cache line: working memory is divided into full lines
EDGE = round_up(DEPTH * (ROWS + TILE_ROWS) + WIDTH, LINE)  # offset of a tile outside c, after the packed rows of a
ROWS_SCRATCH = EDGE + round_up(TILE_ROWS * TILE_COLUMNS, LINE)  # floats per thread, for packed rows of a
SCRATCH = ROWS_SCRATCH + DEPTH * COLUMNS  # and for a packed block of b


@inner
def pack_b(b: Matrix, depth: int, columns: int, to: int) -> None:
    """b (depth × columns) as panels of TILE_COLUMNS columns, each row of a panel contiguous.

    The last vector of columns is padded with 0; the rest of the last panel is not written.
    """
    keep_apart()
    row = TILE_COLUMNS * FLOAT
    panels, vectors = columns // TILE_COLUMNS, columns // WIDTH
    if b.column == FLOAT:
        for k0 in range(0, depth, RUN):
            for p in range(panels):
                for k in range(k0, min(k0 + RUN, depth)):
                    for j in range(TILE_VECTORS):
                        at = (p * TILE_COLUMNS + j * WIDTH) * FLOAT
                        copy_vector(b.at + k * b.row + at, to + (p * depth + k) * row + j * WIDTH * FLOAT)
        for j in range(panels * TILE_VECTORS, vectors):
            for k in range(depth):
                copy_vector(b.at + k * b.row + j * WIDTH * FLOAT, packed(to, depth, j * WIDTH) + k * row)
    elif b.row == FLOAT:
        squares = depth // WIDTH * WIDTH
        for j in range(0, vectors * WIDTH, WIDTH):
            panel = packed(to, depth, j)
            for k in range(0, squares, WIDTH):
                transpose_square(b.at + j * b.column + k * FLOAT, b.column, panel + k * row, row)
            for k in range(squares, depth):
                for i in range(WIDTH):
                    store(panel + k * row + i * FLOAT, load(b.at + (j + i) * b.column + k * FLOAT))
    else:
        vectors = 0
    for j in range(vectors * WIDTH, round_up(columns, WIDTH)):
        at = packed(to, depth, j)
        for k in range(depth):
            store(at + k * row, load(b.at + k * b.row + j * b.column) if j < columns else np.float32(0))


@inner
def packed(to: int, depth: int, j: int) -> int:
    """The address of column j in a packed b."""
    return to + (j // TILE_COLUMNS * depth * TILE_COLUMNS + j % TILE_COLUMNS) * FLOAT


@inner
def pack_a(a: Matrix, rows: int, ones: int, depth: int, to: int) -> None:
    """a (rows × depth) as panels of TILE_ROWS rows, each column of a panel contiguous, padded with 0.

    `ones` (0 or 1) is the number of extra rows of all 1. If columns are contiguous, each but the last is followed by
    another.
    """
    keep_apart()
    column = TILE_ROWS * FLOAT
    full = 0
    if a.row == FLOAT:
        full = rows // TILE_ROWS
        for k0 in range(0, depth - 1, RUN):
            for p in range(full):
                for k in range(k0, min(k0 + RUN, depth - 1)):
                    for i in range(0, ROW_COPIES * WIDTH, WIDTH):  # the next column overwrites the excess
                        at = a.at + k * a.column + (p * TILE_ROWS + i) * FLOAT
                        copy_vector(at, to + (p * depth + k) * column + i * FLOAT)
        for p in range(full):
            for i in range(TILE_ROWS):
                value = load(a.at + (depth - 1) * a.column + (p * TILE_ROWS + i) * FLOAT)
                store(to + (p * depth + depth - 1) * column + i * FLOAT, value)
    for first in range(full * TILE_ROWS, rows + ones, TILE_ROWS):
        panel = to + first * depth * FLOAT
        for i in range(TILE_ROWS):
            inside, outside = first + i < rows, np.float32(1 if first + i < rows + ones else 0)
            for k in range(depth):
                value = load(a.at + (first + i) * a.row + k * a.column) if inside else outside
                store(panel + k * column + i * FLOAT, value)


@inner
def put_edge(edge: int, rows: int, columns: int, c: Matrix, bias: int, skip: Matrix) -> None:
    """Copies the part of a full tile that is inside c."""
    keep_apart()
    for i in range(rows):
        for j in range(columns):
            value = load(edge + (i * TILE_COLUMNS + j) * FLOAT)
            if bias:
                value += load(bias + j * FLOAT)
            if skip.at:
                value += load(skip.at + i * skip.row + j * FLOAT)
            store(c.at + i * c.row + j * FLOAT, value)


@inner
def tile_in_rows(
    vectors: int, depth: int, a: int, a_row: int, b: int, c: int, c_row: int, bias: int, skip: int, skip_row: int
) -> None:
    """The register tile with this many vectors of columns, for a with contiguous rows."""
    if vectors == TILE_VECTORS:
        tile_of_rows(depth, a, a_row, b, c, c_row, bias, skip, skip_row)
    elif vectors == 1:
        row_tile_1(depth, a, a_row, b, c, c_row, bias, skip, skip_row)
    else:
        row_tile_2(depth, a, a_row, b, c, c_row, bias, skip, skip_row)


@inner
def put_tile(
    rows: int, columns: int, depth: int, a: Matrix, b: int, c: Matrix, bias: int, skip: Matrix, edge: int
) -> None:
    """c = a b + bias + skip for at most one register tile; b is packed, and a has contiguous rows or columns."""
    keep_apart()
    vectors = (min(columns, TILE_COLUMNS) + WIDTH - 1) // WIDTH
    inside = rows >= TILE_ROWS and columns >= vectors * WIDTH
    to, to_row, to_bias, to_skip, skip_row = c.at, c.row, bias, skip.at, skip.row
    if not inside:
        to, to_row, to_bias, to_skip = edge, TILE_COLUMNS * FLOAT, 0, 0
    if a.column == FLOAT:
        tile_in_rows(vectors, depth, a.at, a.row, b, to, to_row, to_bias, to_skip, skip_row)
    elif vectors == TILE_VECTORS:
        tile_of_columns(depth, a.at, a.column, b, to, to_row, to_bias, to_skip, skip_row)
    elif vectors == 1:
        column_tile_1(depth, a.at, a.column, b, to, to_row, to_bias, to_skip, skip_row)
    else:
        column_tile_2(depth, a.at, a.column, b, to, to_row, to_bias, to_skip, skip_row)
    if not inside:
        put_edge(edge, min(rows, TILE_ROWS), min(columns, TILE_COLUMNS), c, bias, skip)


@inner
def depth_step(depth: int) -> int:
    """The depth of a packed block of b: equal blocks of at most DEPTH."""
    blocks = (depth + DEPTH - 1) // DEPTH
    return ((depth + blocks - 1) // blocks + 7) // 8 * 8


@inner
def put_rows(
    rows: int,
    columns: int,
    depth: int,
    a: Matrix,
    ones: int,
    packed_b: int,
    c: Matrix,
    bias: int,
    skip: Matrix,
    work: int,
) -> None:
    """c = a b + bias + skip for a packed block of b, ROWS rows at a time; the last row of a may be `ones`."""
    keep_apart()
    packed_a, edge = work, work + EDGE * FLOAT
    in_place = a.column == FLOAT and not ones
    for i0 in range(0, rows, ROWS):
        mc = min(ROWS, rows - i0)
        a0 = part(a, i0, 0)
        if not in_place:
            last = ones if i0 + mc == rows else 0
            pack_a(a0, mc - last, last, depth, packed_a)
        elif mc % TILE_ROWS:
            last = mc // TILE_ROWS * TILE_ROWS
            pack_a(part(a0, last, 0), mc - last, 0, depth, packed_a + last * depth * FLOAT)
        for j in range(0, columns, TILE_COLUMNS):
            panel, beside = packed_b + j * depth * FLOAT, bias + j * FLOAT if bias else 0
            for i in range(0, mc, TILE_ROWS):
                tile = Matrix(packed_a + i * depth * FLOAT, FLOAT, TILE_ROWS * FLOAT)
                if in_place and i + TILE_ROWS <= mc:
                    tile = part(a0, i, 0)
                to, added = part(c, i0 + i, j), part(skip, i0 + i, j)
                put_tile(mc - i, columns - j, depth, tile, panel, to, beside, added, edge)


@inner
def multiply(
    rows: int, columns: int, depth: int, a: Matrix, ones: int, b: Matrix, c: Matrix, bias: int, skip: Matrix, work: int
) -> None:
    """c = a b + bias + skip on one thread; `work` has room for SCRATCH floats, `bias` is the address of a row or 0.

    With `ones`, the last row of a is not in memory: it is all 1, so that the last row of c is the sum of the rows of b.
    """
    keep_apart()
    packed_b = work + ROWS_SCRATCH * FLOAT
    step = depth_step(depth)
    for j0 in range(0, columns, COLUMNS):
        nc = min(COLUMNS, columns - j0)
        c0 = part(c, 0, j0)
        for k0 in range(0, depth, step):
            kc = min(step, depth - k0)
            pack_b(part(b, k0, j0), kc, nc, packed_b)
            if k0 == 0:
                first = bias + j0 * FLOAT if bias else 0
                put_rows(rows, nc, kc, a, ones, packed_b, c0, first, part(skip, 0, j0), work)
            else:
                put_rows(rows, nc, kc, part(a, 0, k0), ones, packed_b, c0, 0, c0, work)


@inner
def thread_product(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray,
    accumulate: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    """One thread's part of c = a b + bias + skip: some columns, or some rows if there are more of them.

    If c has one row more than a, that row is the sum of the rows of b.
    """
    rows, columns = c.shape
    i0, i1, j0, j1 = 0, rows, 0, columns
    if columns >= rows:
        j0, j1 = thread_range(columns, TILE_COLUMNS, thread, threads)
    else:
        i0, i1 = thread_range(rows, TILE_ROWS, thread, threads)
    to, added = part(matrix(c), i0, j0), Matrix(0, 0, FLOAT)
    if accumulate:
        added = to
    elif skip.size:
        added = part(matrix(skip), i0, j0)
    multiply(
        i1 - i0,
        j1 - j0,
        b.shape[0],
        part(matrix(a), i0, 0),
        rows - a.shape[0] if i1 == rows else 0,
        part(matrix(b), 0, j0),
        to,
        address(bias) + j0 * FLOAT if bias.size else 0,
        added,
        address(work) + thread * work.strides[0],
    )


@kernel("f4[:,:], f4[:,:], f4[:,:], f4[:], f4[:,:], b1, f4[:,:]", "m k, k n, m n, n?, m n?, , threads .")
def _product(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    bias: np.ndarray,
    skip: np.ndarray,
    accumulate: bool,
    work: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    thread_product(a, b, c, bias, skip, accumulate, work, thread, threads)


NO_ROW = np.empty(0, np.float32)
NO_ROWS = np.empty((0, 0), np.float32)


def product(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray = NO_ROW,
    skip: np.ndarray = NO_ROWS,
    out: np.ndarray | None = None,
    accumulate: bool = False,
) -> np.ndarray:
    """a b + bias + skip, float32, (M, K) (K, N) -> (M, N); bias and skip may be empty.

    `accumulate` adds to what is in `out`.
    """
    if out is None:
        out = empty((a.shape[0], b.shape[1]))
    work = scratch(threads(), SCRATCH)
    _product(a, b, out, bias, skip, accumulate, work)
    return out


KERNELS = (_product,)
