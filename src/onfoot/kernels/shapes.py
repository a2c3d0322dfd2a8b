"""What the pairs share: which arrays the kernels take, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from onfoot.kernels.jit import inner

numba.get_num_threads()  # starts the threads
# The bare function: Numba's own would see each time whether the threads have started, ten times as long.
threads: Callable[[], int] = getattr(numba.np.ufunc.parallel, "_get_num_threads", numba.get_num_threads)
FLOAT32 = np.dtype(np.float32)


def fits(*arrays: Any) -> bool:
    """Whether all are NumPy arrays of float32 with something in them; others are left to `ops`."""
    for x in arrays:
        if type(x) is not np.ndarray or (x.dtype is not FLOAT32 and x.dtype != FLOAT32) or not x.size:
            return False
    return True


def contiguous(x: np.ndarray) -> np.ndarray:
    """`x`, copied only where its numbers do not lie in order, or may not be written (Numba tells these apart)."""
    return x if x.flags.c_contiguous and x.flags.writeable else np.array(x, order="C")


def as_rows(x: np.ndarray) -> np.ndarray:
    """(..., C) -> (N, C), float32 with contiguous rows."""
    return contiguous(x if x.dtype == np.float32 else x.astype(np.float32)).reshape(-1, x.shape[-1])


@inner
def share(n: int, grain: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's part of n things, in multiples of `grain`. The same part for the same n, from op to op."""
    grains = (n + grain - 1) // grain
    return min(grains * thread // threads * grain, n), min(grains * (thread + 1) // threads * grain, n)
