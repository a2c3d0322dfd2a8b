"""How the kernels are compiled: once, when first called, and then kept on disk.

Importing this file imports Numba; `onfoot.kernels` itself does not.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core.registry import cpu_target

from onfoot.kernels import say

settings: Any = numba.config
# Sums may be reordered and a*b + c fused: both are needed for vector code. NaN and infinity keep their meaning.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}


def _cache_folder() -> Path:
    """A folder for this very source: Numba would not notice that a kernel's imports have changed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with contextlib.suppress(OSError):
        (home / "onfoot").mkdir(parents=True, exist_ok=True)
    if os.access(home / "onfoot", os.W_OK):
        return home / "onfoot" / name
    return Path(tempfile.gettempdir()) / f"onfoot-{getpass.getuser()}" / name  # a home that cannot be written


def _prefer_wide_vectors() -> None:
    """Lets LLVM use 512-bit vectors where the CPU has them; it avoids them on CPUs that once slowed down."""
    features = binding.get_host_cpu_features()
    if features.get("avx512f") and not settings.CPU_FEATURES and settings.CPU_NAME in (None, ""):
        settings.CPU_NAME = binding.get_host_cpu_name()
        settings.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"


def _vector() -> tuple[int, int, int]:
    """Floats in a vector, and the register tile of a product: rows, and columns in vectors."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()  # those that code is really generated for
    if "+avx512f" in features and "-prefer-256-bit" in features:
        return 16, 8, 3  # 24 of 32 registers hold the tile
    if "+avx2" in features and "+fma" in features:
        return 8, 6, 2  # 12 of 16
    if "+neon" in features:
        return 4, 8, 3  # 24 of 32
    return 4, 6, 2


if not os.environ.get("NUMBA_THREADING_LAYER_PRIORITY"):
    settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]  # the cheapest fork and join first
_prefer_wide_vectors()
_asked = os.environ.get("OMP_NUM_THREADS", "")
if _asked.isdecimal() and not os.environ.get("NUMBA_NUM_THREADS"):
    numba.set_num_threads(max(1, min(int(_asked), settings.NUMBA_NUM_THREADS)))
WIDTH, TILE_ROWS, TILE_VECTORS = _vector()
CACHE = _cache_folder()
_said = False


class Compiled:
    """A function that Numba compiles when it is first needed, for one signature, and keeps on disk."""

    def __init__(self, function: Callable[..., Any], decorator: Callable[..., Any], signature: str, **options: Any):
        self.function, self.decorator, self.signature, self.options = function, decorator, signature, options
        self.compiled: Any = None

    def prepare(self) -> Any:
        """The compiled function."""
        global _said
        if self.compiled is None:
            if not _said and not CACHE.exists():
                say("compiling the kernels for this CPU; this happens once and takes about half a minute")
            _said = True
            before, settings.CACHE_DIR = settings.CACHE_DIR, str(CACHE)
            try:
                self.compiled = self.decorator(self.signature, cache=True, **OPTIONS, **self.options)(self.function)
            finally:
                settings.CACHE_DIR = before
        return self.compiled

    def __call__(self, *args: Any) -> Any:
        return (self.compiled or self.prepare())(*args)

    @property
    def address(self) -> int:
        """Where a routine's code begins."""
        return self.prepare().address


def kernel(signature: str) -> Callable[[Callable[..., Any]], Compiled]:
    """A function with parallel loops, called from Python.

    Numba would join neighbouring loops of the same length into one, and let a thread begin with the second before the
    others have ended the first.
    """
    return lambda function: Compiled(function, numba.njit, signature, parallel={"fusion": False})


def routine(arguments: int) -> Callable[[Callable[..., Any]], Compiled]:
    """A function of integers that kernels call by its address, so that it is not compiled into each of them."""
    signature = f"void({', '.join(['i8'] * arguments)})"
    return lambda function: Compiled(function, numba.cfunc, signature)


# A function that kernels call; compiled into each of them.
inner = numba.njit(**OPTIONS)
