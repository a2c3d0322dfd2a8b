"""Sets the number of compute threads of a process after its libraries are loaded.

By then environment variables are too late for OpenBLAS, which reads them when NumPy is imported, so its own function is
called. Libraries that are loaded later do read the variables.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from functools import lru_cache

from threadpoolctl import ThreadpoolController, threadpool_limits

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def set_threads(n: int) -> None:
    """Sets the number of threads of the kernels, of NumPy's BLAS, and of PyTorch if it is loaded.

    On a shared machine, fewer threads than cores are often faster: threads wait for each other, also for one that has
    no core. The kernels never use more threads than there are cores.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"threads must be an integer >= 1, got {n!r}")
    threadpool_limits(n, user_api="blas")
    for name in VARIABLES:
        os.environ[name] = str(n)  # for libraries loaded later, and for child processes
    if "onfoot.recording.pool" in sys.modules:
        sys.modules["onfoot.recording.pool"].set_threads(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which NumPy's BLAS has one thread: for many small products, waiting for others costs more."""
    return _controller().limit(limits=1, user_api="blas")


@lru_cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def limit(n: int) -> int:
    """Sets n threads unless the environment sets another number; returns the number in effect."""
    requested = [os.environ[name] for name in VARIABLES if os.environ.get(name)]
    if requested:
        return int(requested[0]) if requested[0].isdecimal() else n
    set_threads(n)
    return n
