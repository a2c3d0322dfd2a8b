"""How kernels are written, and how they are called.

Numba compiles them in a separate process (`build`), once per CPU, and the machine code is cached on disk (`library`). A
process that computes loads that code and never imports Numba: there, the decorators only record a kernel's name and
arguments, which saves 100 MB of memory and a second at every start.

A kernel is the code of one thread: its last two arguments are the thread's number and the number of threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from onfoot.kernels import library
from onfoot.recording import pool
from onfoot.recording.recorded_array import active

COMPILING = "ONFOOT_COMPILING" in os.environ
# Sums may be reordered and a*b + c fused: both are needed for vector code. NaN and infinity keep their meaning.
# Kernels allocate nothing, so arrays need no reference counts.
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
    "error_model": "numpy",
    "_nrt": False,
}


def _plain(function: Any) -> Any:
    return function


inner: Any = _plain  # decorates a function that kernels call; inlined into them
exact: Any = _plain  # the same, without reordering of sums
intrinsic: Any = _plain  # decorates a function that builds LLVM instructions
types: Any = None
cgutils: Any = None
arrayobj: Any = None
if COMPILING:
    import numba
    import numba.core.cgutils
    import numba.extending
    import numba.np.arrayobj

    inner = numba.njit(**OPTIONS)
    exact = numba.njit(**{**OPTIONS, "fastmath": {"contract", "nsz"}})
    intrinsic = numba.extending.intrinsic
    types, cgutils, arrayobj = numba.types, numba.core.cgutils, numba.np.arrayobj

SCALARS = {"f4": ctypes.c_float, "f8": ctypes.c_double, "i8": ctypes.c_longlong, "b1": ctypes.c_longlong}
ALL: list[Kernel] = []  # every kernel, in the order of definition


class Kernel:
    """A compiled function, called on all threads with arrays and numbers."""

    def __init__(
        self,
        function: Callable[..., None],
        signature: str,
        name: str = "",
        sizes: str = "",
    ) -> None:
        file = function.__module__.rpartition(".")[2]
        self.name = f"{file}.{name or function.__name__.strip('_')}"
        self.function, self.signature = function, signature
        self.sizes = sizes.split(", ") if sizes else []
        self.entry: Callable[..., int] = self._prepare_and_call
        self.code = 0  # the address of the machine code of one thread
        ALL.append(self)

    @property
    def kinds(self) -> list[str]:
        """The types of the arguments, such as "f4[:,::1]" or "i8"."""
        return self.signature.split(", ")

    @property
    def symbol(self) -> str:
        """The symbol of the machine code."""
        return f"onfoot.{self.name}"

    def prepare(self) -> None:
        """Loads the machine code, which is compiled first if necessary; an ImportError if there is none."""
        address = library.address(self.name, self.symbol)
        kinds: list[Any] = [SCALARS.get(kind, ctypes.py_object) for kind in self.kinds]
        self.entry = ctypes.PYFUNCTYPE(ctypes.c_int, *kinds, ctypes.c_longlong, ctypes.c_longlong)(address)
        self.code = library.address(self.name, f"{self.symbol}.thread")

    def __call__(self, *args: Any) -> None:
        recorder = active.recorder
        if recorder is not None:
            recorder.call(self, args)
            return
        wrong = self.entry(*args, pool.threads(), 0)
        if wrong:
            raise self._refusal(wrong, args)

    def frame(self, args: tuple[Any, ...], threads: int) -> np.ndarray:
        """The arguments as the 64-bit words that the machine code reads, for a call that is made later."""
        words = np.empty(self.words, np.int64)
        wrong = self.entry(*args, threads, words.ctypes.data)
        if wrong:
            raise self._refusal(wrong, args)
        return words

    @cached_property
    def words(self) -> int:
        """The length of a frame in words."""
        return self.offsets[-1] + 1

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each argument in a frame, and the end of the last."""
        offsets = [0]
        for kind in self.kinds:
            offsets.append(offsets[-1] + (1 if kind in SCALARS else 3 + 2 * kind.count(",")))
        return offsets

    def _refusal(self, wrong: int, args: tuple[Any, ...]) -> Exception:
        """The error for an array of the wrong type (wrong > 0) or of sizes that do not match (wrong < 0)."""
        if wrong < 0:
            shapes = ", ".join(str(x.shape) for x in args if hasattr(x, "shape"))
            return ValueError(f"{self.name}: argument {-wrong} does not match the others; the shapes are {shapes}")
        x = args[wrong - 1]
        return TypeError(
            f"{self.name}: argument {wrong} must be {self.kinds[wrong - 1]}, aligned, not {x.dtype} of shape {x.shape} "
            f"and strides {x.strides}"
        )

    def _prepare_and_call(self, *args: Any) -> int:
        self.prepare()
        return self.entry(*args)


def kernel(signature: str, sizes: str = "", name: str = "") -> Callable[[Callable[..., None]], Kernel]:
    """Decorates a kernel, which is called from Python. Array types are Numba's: f4[:,::1] is contiguous, f4[:,:] any.

    `sizes` names the axes of each array, "n c, c, n c": axes of the same name must have the same size, or the call
    raises an error before anything is read. "." is any size; an array with "?" after its axes may be empty. "threads"
    is memory with one row per thread: no more threads are used than rows.
    """
    return lambda function: Kernel(function, signature, name, sizes=sizes)
