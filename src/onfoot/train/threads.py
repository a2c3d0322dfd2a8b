"""The number of threads that a process computes with, set after the libraries are loaded."""

from __future__ import annotations

import os
import sys

from threadpoolctl import threadpool_limits

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def limit(n: int) -> int:
    """Lets NumPy's BLAS, the kernels and PyTorch, where they are loaded, use n threads; returns the number that holds.

    What the user has set in the environment stays. The variables themselves would be too late: OpenBLAS reads them
    when NumPy is imported. So it is told by its own function; libraries that are loaded later do read the variables.
    """
    asked = [os.environ[name] for name in VARIABLES if os.environ.get(name)]
    if asked:
        return int(asked[0]) if asked[0].isdecimal() else n
    threadpool_limits(n, user_api="blas")
    if "onfoot.kernels.pool" in sys.modules:
        sys.modules["onfoot.kernels.pool"].set_threads(n)
    for name in VARIABLES:
        os.environ[name] = str(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)
    return n
