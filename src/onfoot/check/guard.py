"""Protects the checker from what a function may do to NumPy and from results that are too large to read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

MODULES = (np, np.linalg)
TIMES_LARGER = 16  # than all inputs or expected gradients together: a larger result is not read
ALWAYS_READ = 2**20  # entries


@contextmanager
def numpy_restored(replaced: list[str]) -> Iterator[None]:
    """Restores functions of NumPy that are replaced inside, and appends their names to `replaced`."""
    before = [dict(vars(module)) for module in MODULES]
    try:
        yield
    finally:
        for module, old in zip(MODULES, before, strict=True):
            now = vars(module)
            names = [name for name, value in old.items() if now.get(name) is not value]
            for name in names:
                setattr(module, name, old[name])
            replaced += [f"{module.__name__}.{name}" for name in names]


def most_entries(shapes: Sequence[tuple[int, ...]]) -> int:
    """The number of entries above which a returned array is not read."""
    return TIMES_LARGER * sum(math.prod(shape) for shape in shapes) + ALWAYS_READ


def is_too_large(value: Any, most: int) -> bool:
    """Whether an array has so many entries; it may be a view that needs no memory until it is copied."""
    try:
        return math.prod(value.shape) > most
    except (AttributeError, TypeError):
        return False
