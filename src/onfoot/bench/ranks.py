"""Runs `rank_steps` on several ranks of this machine, with one mpiexec per number of ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

INSTALL = 'install mpi4py and MPICH with pip install "onfoot[mpi]"'


def check_mpi() -> None:
    """Raises a ValueError that names what to install if MPI is missing."""
    try:
        import mpi4py  # noqa: F401 (not mpi4py.MPI, which would start MPI here)
    except ImportError:
        raise ValueError(f"several ranks need MPI, but mpi4py is not installed; {INSTALL}") from None
    mpiexec()


def mpiexec() -> str:
    """The mpiexec of this Python environment, or else the one on PATH."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise ValueError(f"several ranks need MPI, but mpiexec was not found; {INSTALL}")
    return found


def run_measure(n: int, launcher: list[str] | None = None, **options: Any) -> dict[str, Any]:
    """The result of `onfoot.bench.rank_steps` on n ranks. `launcher`: the command before the program."""
    if launcher is None:
        launcher = [mpiexec(), "-n", str(n)] if n > 1 else []
    command = [*launcher, sys.executable, "-m", "onfoot.bench.rank_steps"]
    for name, value in options.items():
        if value is not False:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode != 0:
        raise ValueError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])
