"""The threads that kernels run on: those of Numba's threading layers, which work without Numba itself.

All parallel work runs on this one pool, and no other library's threads are woken: two pools that wait actively for
work slow each other down.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

LAYERS = ("omppool", "tbbpool", "workqueue")  # the cheapest fork and join first


def _numba() -> Path:
    try:
        found = importlib.util.find_spec("numba")
    except ValueError:  # there is a module of that name, which nobody has loaded
        found = None
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'numba'")
    return Path(found.submodule_search_locations[0])


@lru_cache(maxsize=1)
def layer() -> Any:
    """The first threading layer that loads here."""
    folder = _numba() / "np" / "ufunc"
    reason: Exception = ImportError(f"no threading layer in {folder}")
    for name in LAYERS:
        for path in (folder / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES):
            if not path.is_file():
                continue
            spec = importlib.util.spec_from_file_location(name, path)
            try:
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError as error:  # a library that it needs is not installed
                reason = error
                continue
            ctypes.CFUNCTYPE(None, ctypes.c_int)(module.launch_threads)(_most)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_one_thread)
            return module
    raise reason


def _asked() -> int:
    """What the environment asks for, or one thread a core."""
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_threads = _asked()
_most = max(_threads, os.cpu_count() or 1)


def _one_thread() -> None:
    """A forked child has none of its parent's threads, and GNU's OpenMP cannot start others: it computes on its own."""
    global _threads, _most
    _threads = _most = 1


def threads() -> int:
    """How many threads kernels run on."""
    return _threads


def set_threads(n: int) -> None:
    """Lets kernels run on n threads, or on as many as there are cores."""
    global _threads
    _threads = max(1, min(n, _most))
