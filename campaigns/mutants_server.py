"""Runs tests in forks of a process that has imported everything but onfoot: seconds per mutant instead of tens.

`python -m campaigns.mutants_server SOURCE [warm]` reads a job per line, {"tests", "file", "seconds"}, and answers with
{"code", "seconds", "last"}: pytest's exit status (a negative one is a signal's, as of a run that hung), and the line
that says which test failed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

WARM = (
    "numpy", "torch", "transformers", "peft", "gguf", "hypothesis", "pytest", "typer.testing", "rich.table", "jinja2",
    "tokenizers", "safetensors.numpy", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
COMPILED = ("kernels/", "quantized.py")  # what the kernels are compiled from


def main() -> None:
    source = Path(sys.argv[1])
    for name in WARM if "warm" in sys.argv[2:] else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.split(".")[0] == "onfoot" for name in sys.modules), "a mutant would not be seen"
    for line in sys.stdin:
        job = json.loads(line)
        if job["file"]:  # a compiled file of the same second and size would hide the mistake
            Path(cache_from_source(str(source / "onfoot" / job["file"]))).unlink(missing_ok=True)
        print(json.dumps(in_a_fork(source, job)), flush=True)


def in_a_fork(source: Path, job: dict[str, Any]) -> dict[str, Any]:
    begun, seconds = time.monotonic(), job["seconds"]
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        output = Path(folder) / "output"
        child = os.fork()
        if child == 0:
            if job["file"].startswith(COMPILED):  # machine code with a mistake is kept apart, and thrown away
                os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
            run_tests(Path(folder), output, job["tests"])
        code, wait = None, 0.002
        while code is None and time.monotonic() < begun + seconds:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(wait)
                wait = min(2 * wait, 0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what hung, and what the tests left behind
        if code is None:
            os.waitpid(child, 0)
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
        told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines
        shutil.rmtree(Path(folder) / "pytest", ignore_errors=True)
    last = told[0 if told is not lines else -1][:200] if told else ""
    return {"code": -signal.SIGKILL if code is None else code, "seconds": time.monotonic() - begun, "last": last}


def run_tests(folder: Path, output: Path, tests: list[str]) -> None:
    """In the fork: ends the process with pytest's exit status."""
    code = 3
    try:
        os.setsid()
        stream = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import pytest

        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            "--tb=no",
            "-rfE",
            f"--basetemp={folder}/pytest",
            "--hypothesis-seed=0",  # the same examples for every mutant, and without one
        ]
        code = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
