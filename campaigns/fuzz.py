"""Hostile files for every reader: nothing but ValueError, no hang over 5 s, no growth over 2 × the file + 200 MB.

Each input is a valid file of a small corpus with a mutation: one that knows the file's structure (JSON, safetensors,
GGUF, chat templates, lines), a blind one (bits, cuts, splices), or something in the file's place that is not a file.
Input i of seed s is always the same; `repeat(s, i, folder)` writes it again.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from campaigns import Outcome
from campaigns.fuzz_corpus import Case, build, show_info
from campaigns.fuzz_mutations import mutate, replace
from onfoot.formats import template

COUNT = 200_000
SECONDS = 5  # of computing for one input: on a busy machine the clock on the wall says nothing
WAITING = 120  # seconds that an input may wait for anything
GROWTH = 200 << 20  # bytes beside twice the file's size
SHOW = 24  # of so many inputs, one is shown by `onfoot info` too, which takes longer than reading it
WORKERS = max(1, min(2, os.cpu_count() or 1))
Result = tuple[str, str, float, float]  # the file, "read", "refused" or what went wrong, seconds, bytes of growth


class Hang(BaseException):
    """Not an Exception: nothing between here and the reader may take it for its own."""


def run(count: int, seed: int) -> Outcome:
    """Feeds `count` inputs to the readers; each failure has the index that repeats it."""
    os.environ["RUST_BACKTRACE"] = "0"  # a tokenizer that panics would spend its time on that
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        cases = build(root / "corpus")
        before = Path.cwd()
        for case in cases:  # what was not mutated is read, and everything is imported
            os.chdir(case.folder)
            case.read(case.folder)
            if case.info is not None:
                show_info(case.folder / case.info)
        os.chdir(before)
        results = _collect(cases, root, count, seed)
    figures: dict[str, Any] = {"inputs": len(results), "refused": 0, "read": 0, "readers": Counter()}
    places: dict[str, list[int]] = {}
    slowest = largest = 0.0
    for index, (reader, verdict, seconds, growth) in sorted(results.items()):
        figures["readers"][reader] += 1
        slowest, largest = max(slowest, seconds), max(largest, growth)
        if verdict in ("refused", "read"):
            figures[verdict] += 1
        else:
            places.setdefault(f"{reader}: {verdict}", []).append(index)
    figures["readers"] = dict(sorted(figures["readers"].items()))
    figures |= {"slowest_seconds": round(slowest, 2), "largest_growth_mb": round(largest / 1e6)}
    order = sorted(places.items(), key=lambda item: -len(item[1]))
    return Outcome(figures, [f"seed {seed}, index {at[0]} ({len(at)} such): {what}" for what, at in order])


def make(case: Case, file: str, folder: Path, random: Random) -> None:
    """Puts the hostile variant of one of a case's files in its place."""
    path = folder / file
    if random.random() < 0.01:
        replace(path, random)
    else:
        path.write_bytes(mutate(path.read_bytes(), file, random))


def choose(cases: list[Case], seed: int, index: int) -> tuple[Random, Case, str]:
    """The case and the file of an input, and the numbers that its mutation is made with."""
    random = Random(f"{seed}:{index}")
    case = random.choices(cases, [case.weight for case in cases])[0]
    return random, case, random.choice(case.files)


def repeat(seed: int, index: int, folder: str | Path) -> None:
    """Writes input `index` of a seed below `folder`, and reads it; for a look at a failure."""
    cases = build(Path(folder))
    random, case, file = choose(cases, seed, index)
    make(case, file, case.folder, random)
    print(f"{case.name}: {case.folder / file}", flush=True)
    os.chdir(case.folder)
    if case.info is not None:
        show_info(case.folder / case.info)
    case.read(case.folder)


@dataclass
class _Worker:
    process: Any
    index: int | None  # the input that it is at
    computed: float = 0.0  # seconds that it had computed when it began with it
    since: float = field(default_factory=time.monotonic)


def _collect(cases: list[Case], root: Path, count: int, seed: int) -> dict[int, Result]:
    """The result of every input, from workers that are replaced when they hang or die."""
    context = get_context("fork")
    results: dict[int, Result] = {}
    workers: dict[Connection, _Worker] = {}
    begun = time.monotonic()

    def start(first: int) -> None:
        here, there = context.Pipe(duplex=False)
        folder = root / f"worker-{first}"
        process = context.Process(target=_work, args=(cases, folder, there, range(first, count, WORKERS), seed))
        process.start()
        there.close()
        workers[here] = _Worker(process, None)

    def ended(here: Connection, verdict: str) -> None:
        worker = workers.pop(here)
        worker.process.kill()
        worker.process.join()
        if worker.index is None:
            raise RuntimeError(f"the campaign itself failed: {verdict}")
        _, case, file = choose(cases, seed, worker.index)
        results[worker.index] = f"{case.name}/{file}", verdict, time.monotonic() - worker.since, 0.0
        print(f"  index {worker.index}, {case.name}/{file}: {verdict}", flush=True)
        if worker.index + WORKERS < count:
            start(worker.index + WORKERS)

    for number in range(min(WORKERS, count)):
        start(number)
    shown = 0
    while workers:
        for here in wait(list(workers), timeout=1):
            assert isinstance(here, Connection)
            try:
                kind, value = here.recv()
            except EOFError:
                workers[here].process.join()
                ended(here, f"the process died with status {workers[here].process.exitcode}")
                continue
            if kind == "begins":
                workers[here] = _Worker(workers[here].process, *value)
            elif kind == "result":
                index, workers[here].index = workers[here].index, None
                assert index is not None
                results[index] = value
                if value[1] not in ("refused", "read"):
                    print(f"  index {index}, {value[0]}: {value[1]}", flush=True)
            elif kind == "fails":
                raise RuntimeError(f"the campaign itself failed at seed {seed}, index {workers[here].index}: {value}")
            else:
                workers.pop(here).process.join()
        for here, worker in list(workers.items()):
            if worker.index is not None and time.monotonic() - worker.since > 2 * SECONDS:
                computed = _computed(worker.process.pid) - worker.computed
                if computed > 2 * SECONDS or time.monotonic() - worker.since > WAITING:
                    ended(here, f"hangs outside Python: {computed:.0f} s of computing")
        if len(results) // 5000 > shown:
            shown = len(results) // 5000
            bad = sum(verdict not in ("refused", "read") for _, verdict, _, _ in results.values())
            rate = len(results) / (time.monotonic() - begun)
            print(f"  {len(results):,} inputs, {bad} failures, {rate:.0f} inputs per second", flush=True)
    return results


def _work(cases: list[Case], folder: Path, out: Connection, indices: range, seed: int) -> None:
    """A worker: its own copy of the corpus, one input after the other."""
    corpus = cases[0].folder.parent
    shutil.copytree(corpus, folder, symlinks=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic inside a tokenizer writes there
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _hang)
    template.SECONDS = 0.1  # that the limit holds is what counts; waiting for it 50,000 times would take all day
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    try:
        for index in indices:
            out.send(("begins", (index, time.process_time())))
            out.send(("result", _one(cases, corpus, folder, seed, index)))
        shutil.rmtree(folder)
        out.send(("done", None))
    except BaseException:
        out.send(("fails", traceback.format_exc()))


def _one(cases: list[Case], corpus: Path, folder: Path, seed: int, index: int) -> Result:
    """Makes one input, reads it, and puts the valid file back."""
    random, case, file = choose(cases, seed, index)
    place = folder / case.folder.relative_to(corpus)
    os.chdir(place)
    path = place / file
    whole = path.read_bytes()
    make(case, file, place, random)
    size = path.stat().st_size if path.is_file() else 0
    before, begun = _reset_peak(), time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        verdict = _verdict(case, place, index % SHOW == 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    except Hang:
        verdict = f"hangs for over {SECONDS} s"
    seconds, growth = time.process_time() - begun, _peak() - before
    if growth > 2 * size + GROWTH:
        verdict = f"grows by {growth / 1e6:.0f} MB"
    _put_back(path, whole)
    return f"{case.name}/{file}", verdict, seconds, growth


def _verdict(case: Case, place: Path, show: bool) -> str:
    try:
        if show and case.info is not None:
            show_info(place / case.info)
        case.read(place)
    except ValueError as error:
        text = str(error)
        if type(error) is not ValueError and not isinstance(error, UnicodeError):
            return f"{type(error).__name__} {_where(error)}"
        if isinstance(error, UnicodeError):
            return f"{type(error).__name__} {_where(error)}"
        if "\n" in text.strip() or len(text) > 1500:
            return f"an error of {len(text)} characters, {text.count(chr(10))} line ends {_where(error)}"
        if str(place) not in text:
            return f"an error that does not name the file: {re.sub('[0-9]+', 'N', text)[:120]} {_where(error)}"
        return "refused"
    except Hang:
        raise
    except BaseException as error:  # a panic of pyo3 is no Exception
        return f"{type(error).__name__} {_where(error)}: {re.sub('[0-9]+', 'N', str(error))[:100]}"
    return "read"


def _where(error: BaseException) -> str:
    """The innermost line of onfoot that the error came through."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if "/onfoot/" in f.filename]
    return f"at {own[-1].filename.rpartition('/onfoot/')[2]}:{own[-1].lineno}" if own else ""


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def _put_back(path: Path, whole: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(whole)


def _computed(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _reset_peak() -> int:
    """Bytes in memory now; the peak is counted from here (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak()


def _peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
