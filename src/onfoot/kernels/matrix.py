"""A matrix as kernels pass it to each other: an address and strides instead of an array."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onfoot.kernels.jit import inner
from onfoot.kernels.simd import address

FLOAT = 4  # bytes


class Matrix(NamedTuple):
    """The address of the first element, and the strides in bytes of rows and columns. Address 0: no matrix."""

    at: int
    row: int
    column: int


@inner
def matrix(x: np.ndarray) -> Matrix:
    """A matrix from an array of two axes."""
    return Matrix(address(x), x.strides[0], x.strides[1])


@inner
def head_of(x: np.ndarray, b: int, h: int) -> Matrix:
    """One head of an array (B, H, T, D) with a contiguous last axis; no matrix if the array is empty."""
    at = address(x) + b * x.strides[0] + h * x.strides[1] if x.size else 0
    return Matrix(at, x.strides[2], FLOAT)


@inner
def part(m: Matrix, i: int, j: int) -> Matrix:
    """The submatrix from row i and column j on; no matrix if m is none."""
    return Matrix(m.at + i * m.row + j * m.column if m.at else 0, m.row, m.column)


@inner
def transposed(m: Matrix) -> Matrix:
    return Matrix(m.at, m.column, m.row)
