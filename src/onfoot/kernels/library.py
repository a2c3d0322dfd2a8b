"""The machine code of the kernels: compiled once for this CPU, tested, cached on disk, loaded without Numba.

A folder holds one object file per kernel and, written last, a manifest with their checksums. A folder that does not
match its manifest is compiled again. A temporary failure (a full disk, a compiler that was killed) leaves no folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import mmap
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding

from onfoot.kernels import compiler, cpu, manifest, private, say, symbols
from onfoot.kernels.manifest import Code
from onfoot.recording import pool
from onfoot.recording.native_loop import SYMBOL

HEAD = object.__basicsize__  # bytes before the fields of a Python object
# Offsets of the fields of NumPy's C struct `PyArrayObject_fields`, and of a dtype's type number.
DATA, NDIM, SHAPE, STRIDES, DTYPE, FLAGS, DTYPE_NUMBER = (HEAD + at for at in (0, 8, 16, 24, 40, 48, 12))
C_CONTIGUOUS, ALIGNED = 1, 0x100
SMAPS = Path("/proc/self/smaps")  # Linux: the memory mappings of this process
PACKAGE = Path(__file__).parents[1]
COMPILED_IN = "__init__", "native_loop", "recorded_array", "pool"  # files of `recording` that are compiled in
SOURCES = "kernels/*.py", "ops/**/*.py", *(f"recording/{name}.py" for name in COMPILED_IN), "arrays.py", "quantized.py"


class Library(NamedTuple):
    """Machine code in memory."""

    engine: Any  # LLVM's loader
    code: Code
    errors: dict[str, str]  # kernel -> why it cannot be called


def sources() -> list[Path]:
    """The files that machine code depends on."""
    return [path for pattern in SOURCES for path in sorted(PACKAGE.glob(pattern))]


def folder_name() -> str:
    """A folder name that is unique to this source, compiler and CPU."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    triple = binding.get_process_triple()
    for fact in (cpu.NAME, cpu.FEATURES, *versions, platform.python_version(), HEAD, triple):
        digest.update(f"{fact}\n".encode())
    return f"kernels-{digest.hexdigest()[:16]}"


_folder: Path | None = None


def use(folder: Path) -> None:
    """Makes this process load its machine code from a folder that is not in the cache yet."""
    global _folder
    _folder = folder


@lru_cache(maxsize=1)
def code() -> Code:
    """All machine code, which is compiled first if necessary; an ImportError or OSError if that fails."""
    if _folder is not None:
        return manifest.read(_folder)
    name = folder_name()
    try:
        folder = private.cache_home() / name
        found, _ = _read_valid(folder)
        if found is None:
            private.check_writable(folder.parent)
    except OSError as error:
        where = f": {error.filename}" if error.strerror and error.filename else ""
        say(f"cannot cache the kernels ({error.strerror or error}{where}); compiling them for this process only")
        with tempfile.TemporaryDirectory(prefix="onfoot-") as fresh:
            return compiler.build(Path(fresh) / name)
    if found is None:
        with _file_lock(folder.with_suffix(".lock")):
            found, problem = _read_valid(folder)
            if found is None:
                if problem:
                    say(f"the machine code in {folder} is damaged ({problem}); compiling it again")
                found = compiler.build(folder)
            private.remove_old(folder.parent)
    private.mark_as_used(folder)
    return found


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """A file lock: one process compiles, the others wait. Without file locks, each compiles for itself."""
    from filelock import FileLock

    lock = FileLock(path, mode=0o600)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _read_valid(folder: Path) -> tuple[Code | None, str]:
    """The code in a folder, or what is wrong with it; neither if it does not exist."""
    if not os.path.lexists(folder):
        return None, ""
    try:
        return manifest.read(folder), ""
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return None, str(error)


@lru_cache(maxsize=1)
def load() -> Library:
    """Loads all machine code with LLVM; an ImportError or OSError if that fails."""
    _check_layout()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    found = code()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    for symbol, where in pool.system_functions().items():
        binding.add_symbol(symbol, where)
    errors = {**found.errors, **missing_symbols(found)}
    if "pool" in errors:
        raise ImportError(errors["pool"])
    for name, data in sorted(found.objects.items()):
        if name not in errors:
            engine.add_object_file(binding.ObjectFileRef.from_data(data))
    engine.finalize_object()
    pool.native.load(lambda symbol: int(engine.get_function_address(symbol)))
    pool.set_threads(pool.threads())
    return Library(engine, found, errors)


def missing_symbols(found: Code) -> dict[str, str]:
    """Kernel -> error, for kernels with an undefined symbol: LLVM would abort the process."""
    missing = {}
    for name, data in found.objects.items():
        for symbol in symbols.undefined(data):
            if symbol != SYMBOL and not binding.address_of_symbol(symbol):
                missing[name] = f"undefined symbol {symbol}"
    return missing


def _check_layout() -> None:
    """Kernels read NumPy's array struct directly, so its layout must be as in the C API; an ImportError if not."""
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
        raise ImportError("unknown memory layout of NumPy arrays")


def release_compiler() -> None:
    """Returns the memory of LLVM's library to the system, on Linux: once everything is loaded, nothing calls it.

    These are pages of a file that this process has not written to; should LLVM be called again, they are read again.
    """
    if not SMAPS.is_file():
        return
    libc = ctypes.CDLL(None)
    mappings = SMAPS.read_text(encoding="utf-8", errors="replace")
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", mappings, flags=re.MULTILINE):
        clean = re.match(r"([0-9a-f]+)-([0-9a-f]+) r-.p .*libllvmlite", mapping)
        if clean and re.search(r"^Private_Dirty: +0 kB", mapping, flags=re.MULTILINE):
            begin, end = (int(word, 16) for word in clean.groups())
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def address(name: str, symbol: str) -> int:
    """The address of a kernel's code; an ImportError if it cannot be called."""
    library = load()
    if name in library.errors:
        raise ImportError(library.errors[name])
    found = int(library.engine.get_function_address(symbol))
    if not found:
        raise ImportError(f"no machine code for {symbol}")
    return found
