"""The machine's limits: matrix product throughput and memory bandwidth."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

STATUS = Path("/proc/self/status")


def sgemm_gflops(n: int = 1024, width: int = 3072, rounds: int = 5) -> float:
    """The best rate of float32 matrix products of the size of GPT-2's layers, in GFLOP/s."""
    a, b = np.ones((n, 768), np.float32), np.ones((768, width), np.float32)
    return 2 * n * 768 * width / _best(lambda: a @ b, rounds) / 1e9


def read_gbytes(megabytes: int = 512, rounds: int = 3) -> float:
    """The best rate of reading memory that is not in a cache, in GB/s."""
    a = np.ones(megabytes * 2**18, np.float32)
    return a.nbytes / _best(a.max, rounds) / 1e9


def _best(work: object, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def describe() -> str:
    """The processor, its cores, and the versions of Python and NumPy."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    versions = [f"Python {platform.python_version()}", f"NumPy {np.__version__}"]
    return f"{model}, {os.cpu_count()} cores, {platform.system()}; {', '.join(versions)}"


def peak_bytes() -> int:
    """This process's peak memory, or 0 if the system does not report it.

    On Linux, ru_maxrss would include the parent's memory at the start of this process. macOS reports bytes, others KiB.
    """
    if STATUS.is_file():
        line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
