"""What the pairs share: which arrays the kernels take, and how."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.kernels.jit import inner
from onfoot.kernels.pool import threads

__all__ = ["FLOAT32", "as_rows", "contiguous", "fits", "round_up", "share", "threads"]

FLOAT32 = np.dtype(np.float32)


def fits(*arrays: Any) -> bool:
    """Whether all are NumPy arrays of float32 with something in them; others are left to `ops`."""
    for x in arrays:
        if type(x) is not np.ndarray or (x.dtype is not FLOAT32 and x.dtype != FLOAT32) or not x.size:
            return False
    return True


def contiguous(x: np.ndarray) -> np.ndarray:
    """`x`, copied only where its numbers do not lie in order."""
    return x if x.flags.c_contiguous else np.array(x, order="C")


def as_rows(x: np.ndarray) -> np.ndarray:
    """(..., C) -> (N, C), float32 with contiguous rows."""
    if x.dtype is not FLOAT32:
        x = x.astype(FLOAT32, copy=False)
    return contiguous(x).reshape(-1, x.shape[-1])


@inner
def round_up(n: int, grain: int) -> int:
    """n, or the next multiple of `grain`."""
    return (n + grain - 1) // grain * grain


@inner
def share(n: int, grain: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's part of n things, in multiples of `grain`. The same part for the same n, from op to op."""
    grains = (n + grain - 1) // grain
    return min(grains * thread // threads * grain, n), min(grains * (thread + 1) // threads * grain, n)
