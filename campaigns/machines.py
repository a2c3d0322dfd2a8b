"""Kernels for other CPUs: generic x86-64, AVX2, AVX-512 where there is one, and emulated ARM, through all kernel tests.

Each target's kernels are compiled into a folder of their own, and the tests that compare numbers run on them. `count`
is how many targets are tried, in the order of TARGETS. The tests bring their own seeds; the campaign's changes nothing.
ARM is emulated by QEMU (`campaigns/emulated_arm.py`), which takes an hour or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from llvmlite import binding

from campaigns import Outcome, emulated_arm

AVX2 = "+sse4.2,+popcnt,+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,-prefer-256-bit"
TARGETS = {  # name -> the CPU and its features, as LLVM has them
    "x86-64": ("x86-64", ""),
    "x86-64 with AVX2": ("x86-64-v3", AVX2),
    "x86-64 with AVX-512": ("x86-64-v4", AVX512),
    "aarch64": ("", ""),
}
COUNT = len(TARGETS)
ROOT = Path(__file__).parents[1]
NOT_OF_NUMBERS = ("test_engine.py", "test_library.py", "test_targets.py")  # the same whatever the CPU
ON_ARM = ("test_fused.py", "test_kernel_gradients.py", "test_quantized.py", "test_self_test.py")  # without PyTorch
HOURS = 6  # after which a target counts as one whose tests do not end

# Compiles the kernels of some files only, and proves them; the arguments are a folder and the files.
SOME = """
import os, sys
from importlib import import_module
from pathlib import Path
from onfoot.kernels import compiler, jit, manifest, self_test
work, files = Path(sys.argv[1]), sys.argv[2:]
for file in self_test.COMPARISONS:
    import_module(f"onfoot.kernels.{file}")
wanted = {kernel.name for file in files for kernel in import_module(f"onfoot.kernels.{file}").KERNELS}
for kernel in jit.ALL:
    if kernel.name not in wanted:
        (work / f"{kernel.name}.taken").touch()
        (work / f"{kernel.name}.error").write_text("left out")
built = compiler.compile_all(work)
manifest.write(work, built)
errors = {name: error for name, error in built.errors.items() if name in wanted}
print(len(built.objects), "kernels, refused", {**errors, **compiler.prove(work, built).refused})
"""


def run(count: int, seed: int) -> Outcome:
    outcome = Outcome({})
    for name in [*TARGETS][:count]:
        reason = unavailable(name)
        if reason:
            outcome.figures[name] = f"not run: {reason}"
            continue
        print(f"  {name} ...", flush=True)
        begun = time.monotonic()
        figures, failures = run_tests(name)
        outcome.figures[name] = {**figures, "seconds": round(time.monotonic() - begun)}
        outcome.failures += [f"{name}: {failure}" for failure in failures]
    return outcome


def unavailable(name: str) -> str:
    """Why a target's code cannot run here; empty where it can."""
    if name == "aarch64":
        return emulated_arm.unavailable()
    if not binding.get_process_triple().startswith("x86_64"):
        return "not an x86-64 machine"
    has = binding.get_host_cpu_features()
    missing = [one[1:] for one in TARGETS[name][1].split(",") if one.startswith("+") and not has.get(one[1:])]
    return f"this CPU lacks {missing[0]}" if missing else ""


def environment(name: str, home: Path) -> dict[str, str]:
    """What makes a process compile for a target, into a folder of its own."""
    cpu, features = TARGETS[name]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")])
    target = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features} if cpu else {}
    return {**os.environ, **target, "XDG_CACHE_HOME": str(home), "PYTHONPATH": path}


def run_tests(name: str) -> tuple[dict[str, Any], list[str]]:
    """Figures of a target, and the tests that fail on it."""
    files = sorted(path.name for path in (ROOT / "tests" / "kernels").glob("test_*.py"))
    files = [file for file in files if file not in NOT_OF_NUMBERS and (name != "aarch64" or file in ON_ARM)]
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        env, python = environment(name, work / "cache"), sys.executable
        if name == "aarch64":
            python = str(emulated_arm.python(work / "arm"))
        report = work / "report.xml"
        paths = [str(ROOT / "tests" / "kernels" / file) for file in files]
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths]
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HOURS * 3600)
        except subprocess.TimeoutExpired:
            return {}, [f"the tests did not end in {HOURS} hours"]
        if not report.exists():
            return {}, [f"the tests ended with status {done.returncode}: {(done.stdout + done.stderr)[-300:]!r}"]
        cases = [*ElementTree.parse(report).iter("testcase")]
        (kept,) = (work / "cache").glob("onfoot/kernels-*/manifest")
        slower = json.loads(kept.read_text().partition("\n")[2])["slower"]
    of = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    failures = [f"{case.get('classname')}::{case.get('name')}" for case in (*of["failure"], *of["error"])]
    if done.returncode and not failures:
        failures = [f"the tests ended with status {done.returncode}"]
    figures = {
        "tests": len(cases),
        "failed": len(failures),
        "skipped": len(of["skipped"]),
        "times NumPy's step": slower,
    }
    return figures, failures


def prove_some(name: str, files: Sequence[str]) -> str:
    """Compiles the kernels of a few files for a target and compares them with their formulas; what came of it."""
    with tempfile.TemporaryDirectory() as made:
        work, python = Path(made) / "work", sys.executable
        work.mkdir(mode=0o700)
        if name == "aarch64":
            python = str(emulated_arm.python(Path(made) / "arm"))
        env = environment(name, Path(made) / "cache")
        done = subprocess.run([python, "-c", SOME, str(work), *files], env=env, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-500:]}"
