"""What fits into an exported page: the size is estimated from shapes alone, before any number is computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from onfoot.explore.study import Study
    from onfoot.explore.tensors import Tensor

MAX_PAGE_BYTES = 64 * 2**20  # of an exported page
BYTES_PER_CELL = 8 * 4 / 3  # float64 in base64
BYTES_PER_ARRAY = 700  # its description
COPIES = 8  # arrays of the size of all parameters in the views of training: steps, moments and updates
LARGE_TABLE = 4_096  # cells; smaller arrays are never left out


class ExportPlan(NamedTuple):
    """The arrays that an exported page leaves out, and its estimated size in bytes."""

    left_out: list[str]
    n_bytes: int
    smallest: int  # cells of the smallest array that is left out

    def __str__(self) -> str:
        if not self.left_out:
            return f"about {self.n_bytes / 1e6:.0f} MB"
        n = len(self.left_out)
        arrays, are, overviews, their = ("array", "is", "an overview", "its")
        if n != 1:
            arrays, are, overviews, their = ("arrays", "are", "overviews", "their")
        return (
            f"about {self.n_bytes / 1e6:.0f} MB; {n:,} {arrays} of {self.smallest:,} cells or more {are} left out, "
            f"with {overviews} in {their} place; onfoot explore without --export shows all"
        )


def plan_export(study: Study) -> ExportPlan:
    """Leaves out the largest arrays until the page fits. Raises ValueError at once if it cannot fit."""
    by_size: list[Tensor] = sorted(study.tensors, key=lambda tensor: -tensor.size)
    total = _bytes(study, [tensor.size for tensor in by_size])
    left_out: list[str] = []
    smallest = 0
    for tensor in by_size:
        if total <= MAX_PAGE_BYTES or tensor.size < LARGE_TABLE:
            break
        left_out.append(tensor.id)
        smallest = tensor.size
        total -= math.ceil(tensor.size * BYTES_PER_CELL)
    if total > MAX_PAGE_BYTES:
        raise ValueError(
            f"the page would have about {total / 1e6:,.0f} MB even without large tables, the limit is "
            f"{MAX_PAGE_BYTES / 1e6:.0f} MB; export a shorter text or a smaller model, or omit --export and open it in "
            f"the browser"
        )
    return ExportPlan(left_out, total, smallest)


def _bytes(study: Study, sizes: list[int]) -> int:
    views = 0 if study.is_large else COPIES * study.model.n_params
    vocabulary = 12 * study.model.config.vocab_size
    return math.ceil((sum(sizes) + views) * BYTES_PER_CELL) + BYTES_PER_ARRAY * len(sizes) + vocabulary
