"""Derivatives by finite differences, with adaptive steps, an error estimate and detection of kinks.

Central differences with decreasing steps, extrapolated (Ridders' method). Truncation error falls with the step and
rounding error rises; the tableau shows where their sum is smallest. The caller supplies the rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SHRINK = 2.0
LEVELS = 16


@dataclass(frozen=True)
class Derivative:
    """A derivative, its estimated error, and the step it was computed with."""

    value: float
    error: float
    step: float
    left: float  # one-sided derivatives; they differ at a kink
    right: float

    @property
    def has_kink(self) -> bool:
        return self.left != self.right

    def agrees(self, value: float, tolerance: float) -> bool:
        """Whether `value` equals this derivative or, at a kink, is between the one-sided derivatives."""
        low, high = min(self.left, self.right), max(self.left, self.right)
        if self.has_kink and low - tolerance <= value <= high + tolerance:
            return True
        return abs(value - self.value) <= tolerance


def derivative(function: Callable[[float], float], noise: float, start: float = 0.25) -> Derivative:
    """Returns f'(0); `noise` is the rounding error of f, and `start` the largest step."""
    table: list[list[float]] = []
    best, error, step = math.nan, math.inf, start
    one_sided: list[tuple[float, float, float]] = []  # step, left, right
    middle = function(0.0)
    for level in range(LEVELS):
        h = start / SHRINK**level
        up, down = function(h), function(-h)
        one_sided.append((h, (middle - down) / h, (up - middle) / h))
        row = [(up - down) / (2 * h)]
        for order, before in enumerate(table[-1] if table else [], 1):
            factor = SHRINK ** (2 * order)
            row.append((factor * row[-1] - before) / (factor - 1))
        if table:
            for order, value in enumerate(row[1:], 1):
                spread = max(abs(value - row[order - 1]), abs(value - table[-1][order - 1]))
                estimate = spread + 2 * noise / h
                if estimate < error:
                    best, error, step = value, estimate, h
        table.append(row)
    left, right = _sides(one_sided, noise)
    if left != right:
        best, error = (left + right) / 2, abs(right - left) / 2
    return Derivative(best, error, step, left, right)


def _sides(one_sided: list[tuple[float, float, float]], noise: float) -> tuple[float, float]:
    """The left and right derivatives if there is a kink at 0, else 0 for both.

    For a smooth function the two differ by f'' h, which falls with the step; at a kink the gap stays.
    """
    gaps = [(h, right - left, left, right) for h, left, right in one_sided if noise / h < 0.05 * abs(right - left)]
    if len(gaps) >= LEVELS - 4:
        gaps = gaps[len(gaps) // 2 :]
        sizes = np.array([abs(gap) for _, gap, _, _ in gaps])
        if sizes.min() > 0.8 * sizes.max():
            _, _, left, right = gaps[-1]
            return left, right
    return 0.0, 0.0
