"""The machine code of the kernels: compiled once for this CPU, kept on disk, loaded without Numba."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding

from onfoot import quantized
from onfoot.kernels import cpu, pool, say

HEAD = object.__basicsize__  # bytes before an object's own fields
# Where NumPy's C interface puts an array's fields (`PyArrayObject_fields`), and a dtype's number.
DATA, NDIM, SHAPE, STRIDES, DTYPE, FLAGS, DTYPE_NUMBER = (HEAD + at for at in (0, 8, 16, 24, 40, 48, 12))
C_CONTIGUOUS, ALIGNED = 1, 0x100
BUILDERS = 4  # processes at most; each takes the next kernel that nobody has


def cache_folder() -> Path:
    """A folder for this very source, compiler and CPU."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(quantized.__file__)):
        digest.update(path.read_bytes())
    for fact in (cpu.NAME, cpu.FEATURES, importlib.metadata.version("numba"), HEAD, binding.get_process_triple()):
        digest.update(str(fact).encode())
    name = f"kernels-{digest.hexdigest()[:16]}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with contextlib.suppress(OSError):
        (home / "onfoot").mkdir(parents=True, exist_ok=True)
    if os.access(home / "onfoot", os.W_OK):
        return home / "onfoot" / name
    return Path(tempfile.gettempdir()) / f"onfoot-{getpass.getuser()}" / name  # a home that cannot be written


def build(folder: Path) -> None:
    """Compiles all kernels into a folder, several at a time; it appears whole or not at all."""
    say("compiling the kernels for this CPU; this happens once and takes about half a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        command = [sys.executable, "-m", "onfoot.kernels.build", work]
        env = {**os.environ, "ONFOOT_COMPILING": "1", "NUMBA_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), env.get("PYTHONPATH")]))
        running = [
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(min(os.cpu_count() or 1, BUILDERS))
        ]
        errors = [process.communicate()[1] for process in running]
        for process, error in zip(running, errors, strict=True):
            if process.returncode:
                raise ImportError((error.strip().splitlines() or ["the compiler ended"])[-1])
        with contextlib.suppress(OSError):  # another process was first
            Path(work).rename(folder)
            Path(work).mkdir()  # for the end of this block


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process compiles, the others wait, where the system can make them."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@lru_cache(maxsize=1)
def _folder() -> Path:
    folder = cache_folder()
    if not folder.is_dir():
        with _alone(folder):
            if not folder.is_dir():
                build(folder)
    return folder


@lru_cache(maxsize=1)
def load() -> Any:
    """LLVM's loader with all machine code in it, which is compiled first if need be; an ImportError if it cannot be."""
    _check_layout()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.add_symbol("numba_parallel_for", pool.layer().parallel_for)  # without Numba, nothing is to be had
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    for path in _folder().glob("*.error"):  # a file's kernels are used together or not at all: these are never called
        binding.add_symbol(f"onfoot.{path.stem}", pool.layer().parallel_for)
    for path in sorted(_folder().glob("*.o")):
        engine.add_object_file(binding.ObjectFileRef.from_data(path.read_bytes()))
    engine.finalize_object()
    return engine


def _check_layout() -> None:
    """Kernels read arrays where they lie, so this NumPy must have them as its C interface says."""
    x = np.zeros((2, 3), np.float32)[:, 1:]
    at = id(x)
    shape = (ctypes.c_ssize_t * 2).from_address(ctypes.c_void_p.from_address(at + SHAPE).value or at)
    strides = (ctypes.c_ssize_t * 2).from_address(ctypes.c_void_p.from_address(at + STRIDES).value or at)
    number = ctypes.c_int.from_address((ctypes.c_void_p.from_address(at + DTYPE).value or at) + DTYPE_NUMBER)
    found = (
        ctypes.c_void_p.from_address(at + DATA).value,
        ctypes.c_int.from_address(at + NDIM).value,
        tuple(shape),
        tuple(strides),
        number.value,
        ctypes.c_int.from_address(at + FLAGS).value & C_CONTIGUOUS,
    )
    if found != (x.ctypes.data, 2, x.shape, x.strides, x.dtype.num, 0):
        raise ImportError("NumPy's arrays have an unknown layout")


def address(name: str, symbol: str) -> int:
    """Where a kernel's code begins; an ImportError if it did not compile here."""
    failed = _folder() / f"{name}.error"
    if failed.is_file():
        raise ImportError(failed.read_text().splitlines()[0])
    return int(load().get_function_address(symbol))
