"""Mutants: our own sources with one small mistake each, which the tests must notice.

The list (`mutants_list.py`) is fixed and hand-picked: each mutant changes a few letters of one file, and names the
tests that ought to fail with it. Those tests first have to pass on the sources as they are. A mutant that no test
notices survives: a hole in the tests. One whose text is no longer in its file is stale, which is a failure too, so that
the list stays up to date. The score of a folder is the share of its mutants that were killed; below `LEAST` is a
failure. What changes nothing that could be noticed is marked equivalent, with the argument, and not counted.

The seed changes nothing here: the same list is run every time. ONFOOT_MUTANTS=generate,formats runs some folders only.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns import Outcome

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
COUNT = 10_000  # all of them
LEAST = 0.9
WORKERS = 2
HANG = 600.0  # seconds; a kernel's mutant compiles all kernels again


@dataclass(frozen=True)
class Mutant:
    """One mistake: in `file` (below src/onfoot), `old` becomes `new`, and one of `tests` (below tests/) must fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""  # why nobody could notice it

    @property
    def folder(self) -> str:
        return self.file.split("/")[0] if "/" in self.file else "onfoot"

    @property
    def name(self) -> str:
        return f"{self.file}: {_short(self.old)} → {_short(self.new)}"

    def stale(self, source: Path = SOURCE) -> str:
        """Why it cannot be planted any more, or nothing."""
        path = source / "onfoot" / self.file
        found = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        return "" if found == 1 else f"its text occurs {found} times"

    def plant(self, source: Path) -> None:
        """Puts the mistake into a copy of the sources."""
        path = source / "onfoot" / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:67]}..."


def run(count: int, seed: int) -> Outcome:
    from campaigns.mutants_list import MUTANTS

    asked = {name for name in os.environ.get("ONFOOT_MUTANTS", "").split(",") if name}
    return judge(spread([m for m in MUTANTS if not asked or m.folder in asked], count))


def spread(mutants: list[Mutant], count: int) -> list[Mutant]:
    """The first `count` of them, one from each folder in turn."""
    place: dict[str, int] = defaultdict(int)
    keys = []
    for i, mutant in enumerate(mutants):
        keys.append((place[mutant.folder], i))
        place[mutant.folder] += 1
    return [mutants[i] for _, i in sorted(keys)[:count]]


def judge(mutants: list[Mutant], workers: int = WORKERS, verbose: bool = True, warm: bool = True) -> Outcome:
    """Runs every mutant against its tests, and the tests once without. `warm` imports what most tests need first."""
    live = [m for m in mutants if not m.equivalent]
    failures = [f"stale: {m.name}: {why}" for m in live if (why := m.stale())]
    live = [m for m in live if not m.stale()]
    with tempfile.TemporaryDirectory(prefix="onfoot-mutants-") as folder:
        pool = _Pool(Path(folder), min(workers, max(1, len(live))), verbose, warm)
        try:
            sound = pool.map([(None, (test,)) for test in sorted({t for m in live for t in m.tests})])
            broken = {tests[0]: last for (_, tests), (code, last) in sound if code != 0}
            failures += [f"fails without a mutant: {test}: {last}" for test, last in broken.items()]
            live = [m for m in live if not broken.keys() & {*m.tests}]
            results = pool.map([(m, m.tests) for m in live])
        finally:
            pool.close()
    folders: dict[str, dict[str, Any]] = {}
    for (mutant, _), (code, last) in results:
        assert mutant is not None
        score = folders.setdefault(mutant.folder, {"killed": 0, "total": 0, "survivors": []})
        score["total"] += 1
        if code in (4, 5):
            failures.append(f"no tests for {mutant.name}: {last}")
        elif code == 0:
            score["survivors"].append(mutant.name)
        else:
            score["killed"] += 1
    for folder_name, score in folders.items():
        score["score"] = round(score["killed"] / score["total"], 3)
        if score["score"] < LEAST:
            failures += [f"survives in {folder_name}: {name}" for name in score["survivors"]]
    figures: dict[str, Any] = {
        "killed": sum(s["killed"] for s in folders.values()),
        "total": sum(s["total"] for s in folders.values()),
        "listed": len(mutants),
        "scores": {name: score["score"] for name, score in sorted(folders.items())},
        "equivalent": [f"{m.name}: {m.equivalent}" for m in mutants if m.equivalent],
        "folders": dict(sorted(folders.items())),
    }
    return Outcome(figures, failures)


Job = tuple[Mutant | None, tuple[str, ...]]


class _Pool:
    """Processes that have imported what tests need, but not onfoot, and fork for every job."""

    def __init__(self, folder: Path, workers: int, verbose: bool, warm: bool) -> None:
        self.verbose = verbose
        self.servers = []
        for i in range(workers):
            source = folder / str(i) / "src"
            shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(source)], check=True)
            command = [sys.executable, "-m", "campaigns.mutants_server", str(source), *(["warm"] if warm else [])]
            threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            env = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
            self.servers.append(
                (source, subprocess.Popen(command, cwd=ROOT, env=env, stdin=-1, stdout=-1, encoding="utf-8"))
            )

    def map(self, jobs: list[Job]) -> list[tuple[Job, tuple[int, str]]]:
        """Every job with its exit status and the last line that says why, in the order of the jobs."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        results: dict[int, tuple[int, str]] = {}
        for i in range(len(jobs)):
            todo.put(i)

        def work(source: Path, server: subprocess.Popen[str]) -> None:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                results[i] = self.one(source, server, jobs[i])

        threads = [threading.Thread(target=work, args=pair) for pair in self.servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [(job, results[i]) for i, job in enumerate(jobs)]

    def one(self, source: Path, server: subprocess.Popen[str], job: Job) -> tuple[int, str]:
        mutant, tests = job
        if mutant is not None:
            mutant.plant(source)
        assert server.stdin is not None and server.stdout is not None
        file = "" if mutant is None else mutant.file
        server.stdin.write(json.dumps({"tests": tests, "file": file, "seconds": HANG}) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        if mutant is not None:
            shutil.copyfile(SOURCE / "onfoot" / mutant.file, source / "onfoot" / mutant.file)
        if self.verbose:
            verdict = ("survived" if answer["code"] == 0 else "killed") if mutant else f"exit status {answer['code']}"
            name = mutant.name if mutant else tests[0]
            print(f"{verdict:9} {answer['seconds']:4.0f} s  {name}   {answer['last']}", flush=True)
        return answer["code"], answer["last"]

    def close(self) -> None:
        for _, server in self.servers:
            assert server.stdin is not None and server.stdout is not None
            server.stdin.close()
            server.wait()
            server.stdout.close()
