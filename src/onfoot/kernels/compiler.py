"""Compiles and tests the kernels in separate processes: Numba and possible crashes stay out of this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from onfoot.kernels import manifest, private, say
from onfoot.kernels.manifest import Code

BUILDERS = 4  # processes at most; each takes the next kernel that none has taken
PROOF_SECONDS = 600  # timeout; a self-test takes one or two
CRASHES = {getattr(signal, f"SIG{name}", 0) for name in ("ABRT", "BUS", "FPE", "ILL", "SEGV", "TRAP")}  # signals
IMPORTS = Path(__file__).parents[2]  # where onfoot is imported from


def build(folder: Path) -> Code:
    """Compiles and tests all kernels; the folder is written completely or not at all."""
    say("compiling the kernels for this CPU; this happens once and takes about half a minute")
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder.parent) as made:
        work = Path(made)
        built = compile_all(work)
        manifest.write(work, built)
        built = prove(work, built)
        manifest.write(work, built)
        private.remove(folder)
        with contextlib.suppress(OSError):  # this process uses the code in memory; the next one tries again
            work.rename(folder)
            work.mkdir()  # the end of this block removes it
    return built


def compile_all(work: Path) -> Code:
    """Compiles all kernels, several at a time."""
    running = [start("build", work) for _ in range(min(os.cpu_count() or 1, BUILDERS))]
    try:
        errors = [process.communicate()[1] for process in running]
    finally:
        for process in running:
            process.kill()  # left running after an interrupt
            process.wait()
    for process, error in zip(running, errors, strict=True):
        if process.returncode:
            raise ImportError(how_it_ended("the compiler", process.returncode, error))
    code = Code({}, {}, {}, 0.0)
    for taken in sorted(work.glob("*.taken")):
        if taken.with_suffix(".error").exists():
            code.errors[taken.stem] = taken.with_suffix(".error").read_text(encoding="utf-8").partition("\n")[0]
        else:
            code.objects[taken.stem] = taken.with_suffix(".o").read_bytes()
        taken.unlink()
    return code


def prove(work: Path, built: Code) -> Code:
    """The code with the results of `self_test`, run in separate processes: a kernel that crashes ends only its own."""
    while True:
        process = start("self_test", work)
        try:
            said, error = process.communicate(timeout=PROOF_SECONDS)
        except subprocess.TimeoutExpired:
            raise ImportError(f"the self-test of the kernels did not finish within {PROOF_SECONDS} seconds") from None
        finally:
            process.kill()
            process.wait()
        lines, ended = said.splitlines(), how_it_ended("its self-test", process.returncode, error)
        if process.returncode == 0:
            verdict = json.loads(lines[-1])
            return built._replace(refused=verdict["refused"], slower=verdict["slower"])
        if not lines or lines[-1] in built.refused or -process.returncode not in CRASHES:
            raise ImportError(ended)
        built = built._replace(refused={**built.refused, lines[-1]: ended})  # the file that was being tested
        manifest.write(work, built)


def start(module: str, work: Path) -> subprocess.Popen[str]:
    """Starts `build` or `self_test` in a process with the same imports as this one, none from the working directory."""
    command = f"import sys; sys.path[:] = filter(None, sys.path); from onfoot.kernels import {module} as m; m.main()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(IMPORTS), os.environ.get("PYTHONPATH")]))}
    if module == "build":
        env |= {"ONFOOT_COMPILING": "1", "NUMBA_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", command, str(work)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )


def how_it_ended(what: str, status: int, error: str) -> str:
    """The last line that a failed process wrote, or the signal that killed it."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"{what} was killed by {signal.Signals(-status).name}"
    return (error.strip().splitlines() or [f"{what} exited with status {status}"])[-1]
