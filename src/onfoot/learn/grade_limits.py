"""The limits of a submission's process: time, memory, processes, files and output, and a clean environment."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 2**20
VARIABLE = "ONFOOT_GRADE_LIMITS"
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
SPARE_PROCESSES = 16  # beside those that the user has already, where system calls cannot be filtered


@dataclass(frozen=True)
class Limits:
    """What the process of one exercise of one submission may use."""

    call_seconds: float = 10.0  # wall time per call, and for the import
    seconds: float = 60.0  # wall time, and CPU time per process, for the whole exercise
    memory: int = 2048 * MIB  # address space
    file_bytes: int = 16 * MIB  # per file that it writes
    folder_bytes: int = 64 * MIB  # of all files in its folder
    output_bytes: int = MIB  # printed
    answer_bytes: int = 64 * MIB  # returned by one call
    open_files: int = 64
    filtered: bool = True  # Linux: filter system calls and the file system

    def __post_init__(self) -> None:
        for name in ("call_seconds", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name):g}")
        if self.memory < 256 * MIB:
            raise ValueError(f"memory must be at least 256 MiB, which Python and NumPy need, got {self.memory // MIB}")


def to_text(limits: Limits) -> str:
    return json.dumps(asdict(limits))


def from_text(text: str) -> Limits:
    return Limits(**json.loads(text))


def clean_environment(folder: Path, limits: Limits) -> dict[str, str]:
    """The environment of a submission: where Python finds its modules, and nothing of the user's."""
    found = {name: os.environ[name] for name in KEPT if name in os.environ}
    home = dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"), str(folder))
    return {**found, **home, **dict.fromkeys(THREADS, "1"), "PYTHONIOENCODING": "utf-8", VARIABLE: to_text(limits)}


def apply_limits(limits: Limits) -> None:
    """Limits this process and those it starts. Windows has no such limits: there only time and output are limited."""
    set_limits(
        RLIMIT_CORE=0,
        RLIMIT_CPU=int(limits.seconds) + 1,
        RLIMIT_FSIZE=limits.file_bytes,
        RLIMIT_NOFILE=limits.open_files,
        RLIMIT_AS=limits.memory,
    )


def limit_processes() -> None:
    """Allows a few more processes than the user has now. It does not hold for root."""
    if sys.platform != "win32":
        set_limits(RLIMIT_NPROC=processes_of_user() + SPARE_PROCESSES)


def set_limits(**values: int) -> None:
    """Sets limits of this process, where the system has them; a lower limit that it has already stays."""
    if sys.platform == "win32":
        return
    import resource

    for name, value in values.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):
            if sys.platform.startswith("linux"):  # macOS cannot limit the address space
                raise


def processes_of_user() -> int:
    """How many processes and threads the user has, which the limit on processes counts; a guess where it is unknown."""
    uid, found = os.getuid(), 0  # type: ignore[attr-defined,unused-ignore]
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            found += len(os.listdir(tasks)) if tasks.stat().st_uid == uid else 0
    return found or 1000
