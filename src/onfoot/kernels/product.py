"""The matrix product that all kernels share, c = a b, on one pool of threads.

b is copied panel by panel into the order in which the register tile reads it (transposed where needed, so that a
transposed weight costs nothing); a is read where it lies if its rows are contiguous. An entry of c is always the sum
of the same blocks in the same order, however many threads there are.
"""

from __future__ import annotations

import numpy as np

from onfoot.kernels.buffers import empty, scratch
from onfoot.kernels.cpu import TILE_ROWS, TILE_VECTORS, WIDTH
from onfoot.kernels.jit import inner, kernel, routine
from onfoot.kernels.shapes import share, threads
from onfoot.kernels.simd import (
    TILE_COLUMNS,
    address,
    copy_vector,
    keep_apart,
    load,
    store,
    tile_of_columns,
    tile_of_rows,
    transpose_square,
)

DEPTH = 384  # a panel of b, DEPTH × TILE_COLUMNS, stays in the first-level cache
ROWS = 72  # a block of a, ROWS × DEPTH, stays in the second; a multiple of every TILE_ROWS
COLUMNS = 1536  # a block of b, DEPTH × COLUMNS, stays in the third; a multiple of every TILE_COLUMNS
RUN = 8  # rows that are packed together: a few streams to read, and runs of whole cache lines to write
FLOAT = 4  # bytes
ROW_COPIES = (TILE_ROWS + WIDTH - 1) // WIDTH  # vectors that cover a column of a's panel
SCRATCH = DEPTH * (COLUMNS + ROWS + TILE_ROWS) + TILE_ROWS * TILE_COLUMNS + WIDTH  # floats a thread


@inner
def pack_b(b: int, b_row: int, b_column: int, depth: int, columns: int, to: int) -> None:
    """b (depth × columns) as panels of TILE_COLUMNS columns, each row of a panel contiguous, filled up with 0."""
    keep_apart()
    row = TILE_COLUMNS * FLOAT
    full = columns // TILE_COLUMNS
    if b_column == FLOAT:
        for k0 in range(0, depth, RUN):
            for p in range(full):
                for k in range(k0, min(k0 + RUN, depth)):
                    for j in range(TILE_VECTORS):
                        at = (p * TILE_COLUMNS + j * WIDTH) * FLOAT
                        copy_vector(b + k * b_row + at, to + (p * depth + k) * row + j * WIDTH * FLOAT)
    elif b_row == FLOAT:
        squares = depth // WIDTH * WIDTH
        for p in range(full):
            panel = to + p * depth * row
            for k in range(0, squares, WIDTH):
                for j in range(0, TILE_COLUMNS, WIDTH):
                    source = b + (p * TILE_COLUMNS + j) * b_column + k * FLOAT
                    transpose_square(source, b_column, panel + k * row + j * FLOAT, row)
            for k in range(squares, depth):
                for j in range(TILE_COLUMNS):
                    store(panel + k * row + j * FLOAT, load(b + (p * TILE_COLUMNS + j) * b_column + k * FLOAT))
    else:
        full = 0
    for first in range(full * TILE_COLUMNS, columns, TILE_COLUMNS):
        panel = to + first * depth * FLOAT
        for k in range(depth):
            for j in range(TILE_COLUMNS):
                inside = first + j < columns
                value = load(b + k * b_row + (first + j) * b_column) if inside else np.float32(0)
                store(panel + k * row + j * FLOAT, value)


@inner
def pack_a(a: int, a_row: int, a_column: int, rows: int, depth: int, beyond: int, to: int) -> None:
    """a (rows × depth) as panels of TILE_ROWS rows, each column of a panel contiguous, filled up with 0.

    `beyond` is how many floats may be read behind a column's last.
    """
    keep_apart()
    column = TILE_ROWS * FLOAT
    full = 0
    if a_row == FLOAT:
        full = min(rows // TILE_ROWS, (rows + beyond) // TILE_ROWS - ROW_COPIES * WIDTH // TILE_ROWS)
        full = max(full, 0)
        for k0 in range(0, depth - 1, RUN):
            for p in range(full):
                for k in range(k0, min(k0 + RUN, depth - 1)):
                    for i in range(0, ROW_COPIES * WIDTH, WIDTH):  # what is too much, the next column overwrites
                        at = a + k * a_column + (p * TILE_ROWS + i) * FLOAT
                        copy_vector(at, to + (p * depth + k) * column + i * FLOAT)
        for p in range(full):
            for i in range(TILE_ROWS):
                value = load(a + (depth - 1) * a_column + (p * TILE_ROWS + i) * FLOAT)
                store(to + (p * depth + depth - 1) * column + i * FLOAT, value)
    for first in range(full * TILE_ROWS, rows, TILE_ROWS):
        panel = to + first * depth * FLOAT
        for i in range(TILE_ROWS):
            inside = first + i < rows
            for k in range(depth):
                value = load(a + (first + i) * a_row + k * a_column) if inside else np.float32(0)
                store(panel + k * column + i * FLOAT, value)


@inner
def put_edge(edge: int, rows: int, columns: int, c: int, c_row: int, bias: int, skip: int, skip_row: int) -> None:
    """The part of a tile that lies inside c, from a full tile beside it."""
    keep_apart()
    for i in range(rows):
        for j in range(columns):
            value = load(edge + (i * TILE_COLUMNS + j) * FLOAT)
            if bias:
                value += load(bias + j * FLOAT)
            if skip:
                value += load(skip + i * skip_row + j * FLOAT)
            store(c + i * c_row + j * FLOAT, value)


@inner
def put_tile(
    rows: int,
    columns: int,
    depth: int,
    in_rows: bool,
    a: int,
    a_stride: int,
    b: int,
    c: int,
    c_row: int,
    bias: int,
    skip: int,
    skip_row: int,
    edge: int,
) -> None:
    """c = a b + bias + skip for at most one register tile; a has contiguous rows (`in_rows`) or columns."""
    keep_apart()
    inside = rows >= TILE_ROWS and columns >= TILE_COLUMNS
    to, to_row, to_bias, to_skip = c, c_row, bias, skip
    if not inside:
        to, to_row, to_bias, to_skip = edge, TILE_COLUMNS * FLOAT, 0, 0
    if in_rows:
        tile_of_rows(depth, a, a_stride, b, to, to_row, to_bias, to_skip, skip_row)
    else:
        tile_of_columns(depth, a, a_stride, b, to, to_row, to_bias, to_skip, skip_row)
    if not inside:
        put_edge(edge, min(rows, TILE_ROWS), min(columns, TILE_COLUMNS), c, c_row, bias, skip, skip_row)


@routine(16)
def multiply(
    rows: int,
    columns: int,
    depth: int,
    a: int,
    a_row: int,
    a_column: int,
    b: int,
    b_row: int,
    b_column: int,
    c: int,
    c_row: int,
    bias: int,
    skip: int,
    skip_row: int,
    beyond: int,
    work: int,
) -> None:
    """c = a b + bias + skip on one thread. Addresses and distances in bytes; `work` has room for SCRATCH floats."""
    packed_b = work
    packed_a = packed_b + DEPTH * COLUMNS * FLOAT
    edge = packed_a + (DEPTH * (ROWS + TILE_ROWS) + WIDTH) * FLOAT
    in_place = a_column == FLOAT
    blocks = (depth + DEPTH - 1) // DEPTH
    step = ((depth + blocks - 1) // blocks + 7) // 8 * 8
    for j0 in range(0, columns, COLUMNS):
        nc = min(COLUMNS, columns - j0)
        bias_j = bias + j0 * FLOAT if bias else 0
        for k0 in range(0, depth, step):
            kc = min(step, depth - k0)
            pack_b(b + k0 * b_row + j0 * b_column, b_row, b_column, kc, nc, packed_b)
            for i0 in range(0, rows, ROWS):
                mc = min(ROWS, rows - i0)
                a0 = a + i0 * a_row + k0 * a_column
                c0 = c + i0 * c_row + j0 * FLOAT
                skip0, skip_row0, bias0 = c0, c_row, 0
                if k0 == 0:
                    skip0, skip_row0, bias0 = (skip + i0 * skip_row + j0 * FLOAT if skip else 0), skip_row, bias_j
                if not in_place:
                    pack_a(a0, a_row, a_column, mc, kc, beyond + rows - i0 - mc, packed_a)
                elif mc % TILE_ROWS:
                    last = mc // TILE_ROWS * TILE_ROWS
                    pack_a(a0 + last * a_row, a_row, a_column, mc - last, kc, 0, packed_a + last * kc * FLOAT)
                for j in range(0, nc, TILE_COLUMNS):
                    for i in range(0, mc, TILE_ROWS):
                        in_rows = in_place and i + TILE_ROWS <= mc
                        put_tile(
                            mc - i,
                            nc - j,
                            kc,
                            in_rows,
                            a0 + i * a_row if in_rows else packed_a + i * kc * FLOAT,
                            a_row if in_rows else TILE_ROWS * FLOAT,
                            packed_b + j * kc * FLOAT,
                            c0 + i * c_row + j * FLOAT,
                            c_row,
                            bias0 + j * FLOAT if bias0 else 0,
                            skip0 + i * skip_row0 + j * FLOAT if skip0 else 0,
                            skip_row0,
                            edge,
                        )


@inner
def share_of_product(
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
    """One thread's part of c = a b + bias + skip: some columns, or some rows where there are more of them."""
    rows, depth = a.shape
    columns = b.shape[1]
    by_columns = columns >= rows
    i0, i1, j0, j1 = 0, rows, 0, columns
    if by_columns:
        j0, j1 = share(columns, TILE_COLUMNS, thread, threads)
    else:
        i0, i1 = share(rows, TILE_ROWS, thread, threads)
    at_c = address(c) + i0 * c.strides[0] + j0 * FLOAT
    at_skip, skip_row = 0, c.strides[0]
    if accumulate:
        at_skip = at_c
    elif skip.size:
        skip_row = skip.strides[0]
        at_skip = address(skip) + i0 * skip_row + j0 * FLOAT
    multiply(
        i1 - i0,
        j1 - j0,
        depth,
        address(a) + i0 * a.strides[0],
        a.strides[0],
        a.strides[1],
        address(b) + j0 * b.strides[1],
        b.strides[0],
        b.strides[1],
        at_c,
        c.strides[0],
        address(bias) + j0 * FLOAT if bias.size else 0,
        at_skip,
        skip_row,
        rows - i1,
        address(work) + thread * work.strides[0],
    )


@kernel("f4[:,:], f4[:,:], f4[:,:], f4[:], f4[:,:], b1, f4[:,:]")
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
    share_of_product(a, b, c, bias, skip, accumulate, work, thread, threads)


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


KERNELS = (multiply, _product)
