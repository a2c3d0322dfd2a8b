"""The number of threads that a process computes with, set after the libraries are loaded.

The variables of the environment would be too late then: OpenBLAS reads them when NumPy is imported. So it is told by
its own function; libraries that are loaded later do read the variables.
"""

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


def set_threads(n: int) -> None:
    """Lets this process compute with n threads: the kernels, NumPy's BLAS, and PyTorch where it is loaded.

    On a machine that others use too, fewer threads than cores are often faster: a thread that waits for another that
    has no core waits for nothing. The kernels never run on more threads than there are cores.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"threads={n!r}: a whole number of at least 1 is needed")
    threadpool_limits(n, user_api="blas")
    for name in VARIABLES:
        os.environ[name] = str(n)  # for what is loaded later, and for processes that are started
    if "onfoot.recording.pool" in sys.modules:
        sys.modules["onfoot.recording.pool"].set_threads(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)


def limit(n: int) -> int:
    """The same, unless the user has set another number in the environment; returns the number that holds."""
    asked = [os.environ[name] for name in VARIABLES if os.environ.get(name)]
    if asked:
        return int(asked[0]) if asked[0].isdecimal() else n
    set_threads(n)
    return n
