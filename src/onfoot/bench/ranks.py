"""Starts `rank_steps` on several ranks of this machine, each number of ranks under its own mpiexec."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

INSTALL = 'install mpi4py and MPICH with pip install "onfoot[mpi]"'


def check_mpi() -> None:
    """Says what to install where several ranks could not start."""
    try:
        import mpi4py  # noqa: F401 (not mpi4py.MPI, which would start MPI here)
    except ImportError:
        raise ValueError(f"several ranks need MPI, and mpi4py is not installed; {INSTALL}") from None
    mpiexec()


def mpiexec() -> str:
    """The mpiexec that belongs to this Python, or else the one on the path."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise ValueError(f"several ranks need MPI, and there is no mpiexec; {INSTALL}")
    return found


def run_measure(n: int, launcher: list[str] | None = None, **options: Any) -> dict[str, Any]:
    """What `onfoot.bench.rank_steps` finds on n ranks. `launcher`: the command that starts them, up to the program."""
    if launcher is None:
        launcher = [mpiexec(), "-n", str(n)] if n > 1 else []
    command = [*launcher, sys.executable, "-m", "onfoot.bench.rank_steps"]
    for name, value in options.items():
        if value is not False:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ValueError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])
