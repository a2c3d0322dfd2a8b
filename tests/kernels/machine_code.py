"""Machine code of this process in a test's own folder, so that nothing needs to be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from onfoot.kernels import library, manifest, private
from onfoot.kernels.manifest import Code

# A child process uses the objects of the folder GIVEN instead of compiling and testing.
COMPILE = """
import os, pathlib
from onfoot.kernels import compiler, manifest
given = manifest.read(pathlib.Path(os.environ["GIVEN"]))
def compile_all(work):
    with open(os.environ["GIVEN"] + ".log", "a") as log:
        log.write(f"{work}\\n")
    for name, data in given.objects.items():
        compiler.private.write_own(work / f"{name}.o", data)
    return given
compiler.compile_all, compiler.prove = compile_all, lambda work, built: built
"""
# A model's loss on its kernels, against NumPy's.
USE = """
import numpy as np, onfoot
config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=4, vocab_size=5)
ours, truth, tokens = onfoot.create(config), onfoot.create(config, engine="numpy"), np.array([[1, 2, 3]])
print(ours.engine.name, abs(ours.loss_and_grads(tokens)[0] - truth.loss(tokens)) < 1e-6)
"""


def write(folder: Path, code: Code | None = None) -> Path:
    """This process's machine code (or another's) in a folder."""
    code = code or library.code()
    folder.mkdir(parents=True, mode=0o700)
    for name, data in code.objects.items():
        private.write_own(folder / f"{name}.o", data)
    manifest.write(folder, code)
    return folder


def in_cache(home: Path, code: Code | None = None) -> Path:
    """The same in the cache of a process with `home` as XDG_CACHE_HOME."""
    return write(home / "onfoot" / library.folder_name(), code)


def python(code: str, home: Path, given: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code with that cache; with `given`, it uses the objects of that folder instead of compiling."""
    if given is not None:
        code, env = COMPILE + code, {**env, "GIVEN": str(given)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(home), **env},
        timeout=600,
    )


def compilations(given: Path) -> list[str]:
    """The folders for which objects were taken from `given` instead of compiling."""
    log = Path(f"{given}.log")
    return log.read_text().splitlines() if log.exists() else []
