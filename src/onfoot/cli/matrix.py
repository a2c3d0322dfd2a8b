"""Formats matrices as text: four decimals, an exact 0 as `0`, the middle of a large matrix elided."""

from __future__ import annotations

import itertools

import numpy as np


def matrix_lines(
    x: np.ndarray,
    margin: tuple[str, np.ndarray] | None = None,
    max_rows: int = 12,
    max_columns: int = 12,
    max_width: int | None = None,
) -> list[str]:
    """One line per row of a matrix (a vector is one row), each followed by `margin`: a label and one number per row.

    With `max_width`, columns move closer together, and then more of them are elided, until the lines are that short.
    """
    for columns, gap in itertools.chain([(max_columns, 2)], ((n, 1) for n in range(max_columns, 3, -1))):
        lines = _lines(x, margin, max_rows, columns, gap)
        if max_width is None or max(len(line) for line in lines) <= max_width:
            return lines
    return lines


def _lines(
    x: np.ndarray, margin: tuple[str, np.ndarray] | None, max_rows: int, max_columns: int, gap: int
) -> list[str]:
    table = np.atleast_2d(x)
    rows, columns = _shown(table.shape[0], max_rows), _shown(table.shape[1], max_columns)
    cells = [["⋮" if i is None else "…" if j is None else _number(table[i, j]) for j in columns] for i in rows]
    width = max(len(cell) for line in cells for cell in line)
    lines = [(" " * gap).join(cell.rjust(width) for cell in line) for line in cells]
    if margin is None:
        return lines
    label, values = margin
    return [
        line if i is None else f"{line}{' ' * gap}│ {label} {_number(np.atleast_1d(values)[i])}"
        for line, i in zip(lines, rows, strict=True)
    ]


def _shown(n: int, limit: int) -> list[int | None]:
    """The indices to show, at most `limit` entries; None stands for the elided ones."""
    if n <= limit:
        return list(range(n))
    tail = min(2, limit - 2)
    return [*range(limit - tail - 1), None, *range(n - tail, n)]


def _number(value: float) -> str:
    if isinstance(value, np.integer):
        return str(value)
    if value == 0:
        return "0"
    if np.isinf(value):
        return "−∞" if value < 0 else "∞"
    text = f"{value:.4f}"
    return text.removeprefix("-") if text == "-0.0000" else text
