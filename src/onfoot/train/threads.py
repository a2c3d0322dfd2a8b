"""The number of threads that a process computes with, set after the libraries are loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
PREFIXES = ("scipy_openblas", "openblas")  # NumPy's own wheels rename the functions
SUFFIXES = ("64_", "")


def cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def limit(n: int) -> int:
    """Lets NumPy's BLAS, the kernels and PyTorch, where they are loaded, use n threads; returns the number that holds.

    What the user has set in the environment stays. The variables themselves would be too late: OpenBLAS reads them
    when NumPy is imported. So its own function is called; libraries that are loaded later do read the variables.
    """
    asked = [os.environ[name] for name in VARIABLES if os.environ.get(name)]
    if asked:
        return int(asked[0]) if asked[0].isdecimal() else n
    library = openblas()
    if library is not None:
        library[0](n)
    if "onfoot.kernels.pool" in sys.modules:
        sys.modules["onfoot.kernels.pool"].set_threads(n)
    for name in VARIABLES:
        os.environ[name] = str(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)
    return n


def openblas() -> tuple[Callable[[int], None], Callable[[], int]] | None:
    """OpenBLAS's functions that set and tell its threads, where NumPy came with one."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))  # loaded already: this is the same one
            for name in (f"{prefix}_%s_num_threads{suffix}" for prefix in PREFIXES for suffix in SUFFIXES):
                if hasattr(library, name % "set"):
                    return getattr(library, name % "set"), getattr(library, name % "get")
    return None
