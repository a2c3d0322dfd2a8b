"""A matrix in memory, as kernels hand it to each other: addresses instead of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onfoot.kernels.jit import inner
from onfoot.kernels.simd import address

FLOAT = 4  # bytes


class Matrix(NamedTuple):
    """Where its first number is, and the bytes from row to row and from column to column. At 0 there is none."""

    at: int
    row: int
    column: int


@inner
def matrix(x: np.ndarray) -> Matrix:
    """An array of two axes."""
    return Matrix(address(x), x.strides[0], x.strides[1])


@inner
def head_of(x: np.ndarray, b: int, h: int) -> Matrix:
    """One head of an array (B, H, T, D) whose last axis is contiguous; none, if that is empty."""
    at = address(x) + b * x.strides[0] + h * x.strides[1] if x.size else 0
    return Matrix(at, x.strides[2], FLOAT)


@inner
def part(m: Matrix, i: int, j: int) -> Matrix:
    """What begins at row i and column j; of none, none."""
    return Matrix(m.at + i * m.row + j * m.column if m.at else 0, m.row, m.column)


@inner
def transposed(m: Matrix) -> Matrix:
    return Matrix(m.at, m.column, m.row)
