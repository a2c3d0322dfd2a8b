"""Arrays between pages that nobody may touch: one element too far, in either direction, ends the process."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import pkgutil
from collections.abc import Sequence
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def empty(shape: Sequence[int], dtype: Any = np.float32, at_end: bool = True) -> np.ndarray:
    """An array that ends where a forbidden page begins, or begins where one ends."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if not size:
        return np.empty(shape, kind)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if _protect(begin + page * PAGE, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return np.ndarray(shape, kind, memory, PAGE + (pages * PAGE - size if at_end else 0))


def guarded(x: np.ndarray, at_end: bool = True) -> np.ndarray:
    """A copy of `x` between forbidden pages."""
    made = empty(x.shape, x.dtype, at_end)
    made[...] = x
    return made


def guard_kernels() -> None:
    """Lets all kernels put their results and their working memory between forbidden pages, too."""
    from onfoot import kernels

    for info in pkgutil.iter_modules(kernels.__path__):
        if info.name != "build":
            module = importlib.import_module(f"onfoot.kernels.{info.name}")
            if hasattr(module, "empty"):
                module.empty = empty  # type: ignore[attr-defined]
