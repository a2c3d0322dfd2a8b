"""Grades many submissions: every exercise of each is judged in processes of its own, in a copy of its files.

    results = grade(find_submissions([Path("submissions")]))

A result is written to the file of results as soon as it is known, so that an interrupted batch can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onfoot.formats.write import append
from onfoot.learn.course import COURSE, EXERCISES, SOLUTIONS, Exercise, get_exercise
from onfoot.learn.grade_find import ALL_FILES, Submission, foreign_imports
from onfoot.learn.grade_limits import Limits
from onfoot.learn.grade_process import end_judge, run_judge
from onfoot.terminal import printable

JOBS = 2
CREDITED = ("passed", "partial", "wrong")  # functions that ran in every case
SHOWN = 5  # files of no exercise that are named


@dataclass
class Result:
    """The verdict on one exercise of one submission."""

    student: str
    exercise: str  # its name
    number: int
    status: str  # as Verdict has it, or "not graded" if the judge itself ended
    message: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the teacher
    printed: str = ""  # the first characters that it printed
    seconds: float = 0.0
    key: str = ""  # what was judged: files, exercise and limits

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def gradients(self) -> dict[str, str]:
        """The mark of each gradient, of all functions."""
        return {
            f"{part['function']}.{name}": mark
            for part in self.parts
            for name, mark in part.get("gradients", {}).items()
        }

    @property
    def mistakes(self) -> list[str]:
        """What is wrong, in a few words each: the named mistakes, else the problems, else the message."""
        named = [name for part in self.parts for name in part.get("mistakes", ())]
        problems = [text for part in self.parts for text in part.get("problems", ())]
        unnamed = [f"{', '.join(wrong)} wrong" for part in self.parts if (wrong := _wrong(part))]
        return named or problems or unnamed or ([self.message] if self.message else [])


def _wrong(part: dict[str, Any]) -> list[str]:
    return [name for name, mark in part.get("gradients", {}).items() if mark == "wrong"]


@dataclass(frozen=True)
class Task:
    """One exercise of one submission, to be judged."""

    submission: Submission
    exercise: Exercise
    key: str


def chosen_exercises(submissions: Sequence[Submission], numbers: Iterable[int] | None) -> list[Exercise]:
    """The exercises of these numbers, or all that anyone has handed in."""
    if numbers is not None:
        return [get_exercise(number) for number in dict.fromkeys(numbers)]
    found = [one for one in EXERCISES if any(submission.has(one) for submission in submissions)]
    if not found:
        raise ValueError(f"no submission has an exercise in it; their files are named {EXERCISES[0].file} and so on")
    return found


def grade(
    submissions: Sequence[Submission],
    *,
    exercises: Iterable[int] | None = None,
    jobs: int = JOBS,
    limits: Limits | None = None,
    kept: Path | None = None,
    resume: bool = False,
    on_start: Callable[[int], None] = lambda total: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Judges the exercises of all submissions; `kept` is the file that each result is written to at once.

    With `resume`, results in that file are used again if the same files were judged under the same limits. The results
    are in the order of the submissions, then of the exercises.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1, got {jobs}")
    limits = limits or Limits()
    chosen = chosen_exercises(submissions, exercises)
    tasks = [Task(one, exercise, key_of(one, exercise, limits)) for one in submissions for exercise in chosen]
    before = read_results(kept) if resume and kept is not None else {}
    on_start(len(tasks))
    found: dict[tuple[str, str], Result] = {}

    def keep(result: Result) -> None:
        found[result.student, result.exercise] = result
        on_result(result)

    waiting = []
    for task in tasks:
        old = before.get((task.submission.student, task.exercise.name))
        if old is not None and old.key == task.key and old.status != "not graded":
            keep(old)
        else:
            waiting.append(task)
    for result in judged(waiting, jobs, limits):
        if kept is not None:
            append(kept, json.dumps(asdict(result)) + "\n")
        keep(result)
    return [found[task.submission.student, task.exercise.name] for task in tasks]


def key_of(submission: Submission, exercise: Exercise, limits: Limits) -> str:
    return f"{submission.digest()}:{exercise.name}:{json.dumps(asdict(limits), sort_keys=True)}"


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """The results in a file, by student and exercise; a line that was not written wholly is left out."""
    found: dict[tuple[str, str], Result] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                result = Result(**json.loads(line))
                found[result.student, result.exercise] = result
    return found


def judged(tasks: Sequence[Task], jobs: int, limits: Limits) -> Iterator[Result]:
    """The results of tasks as they come, several judged at a time. Ends all processes if it is interrupted."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    results: queue.SimpleQueue[Result] = queue.SimpleQueue()
    running: dict[int, subprocess.Popen[str]] = {}
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.put(judge_task(task, limits, running, stop))
            except Exception as error:  # a full disk, too many open files: the batch goes on
                found = Result(task.submission.student, task.exercise.name, task.exercise.number, "not graded")
                found.message = f"{type(error).__name__}: {error}"
                results.put(found)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(jobs, len(tasks)))]
    for thread in threads:
        thread.start()
    try:
        for _ in tasks:
            yield results.get()
    finally:
        stop.set()
        for process in list(running.values()):
            end_judge(process)
        for thread in threads:
            thread.join()


def judge_task(task: Task, limits: Limits, running: dict[int, subprocess.Popen[str]], stop: threading.Event) -> Result:
    """Judges one exercise; if it is wrong and builds on others, a second time with their solutions in their place.

    The better verdict counts.
    """
    begun, submission, exercise = time.monotonic(), task.submission, task.exercise
    result = Result(submission.student, exercise.name, exercise.number, "missing", key=task.key)
    result.notes += submission.notes
    if not submission.has(exercise):
        result.message = not_handed_in(submission, exercise)
        return result
    foreign = foreign_imports(submission.files[exercise.file])
    if foreign:
        result.notes.append(f"imports {', '.join(foreign)}")
    if is_as_given(submission, exercise):
        result.status, result.message = "unsolved", f"{exercise.file} is as it was given"
        return result
    needed = [one.file for one in needs(exercise)]
    missing = [name for name in needed if name not in submission.files]
    verdict = run_judge(with_solutions(submission, missing), exercise, limits, running)
    used = missing
    if needed and used != needed and verdict["status"] not in ("passed", "not graded") and not stop.is_set():
        again = run_judge(with_solutions(submission, needed), exercise, limits, running)
        if credit(again) > credit(verdict):  # else it is judged as it was handed in
            verdict, used = again, needed
    if used:
        result.notes.append(f"judged with the solutions of {', '.join(name.removesuffix('.py') for name in used)}")
    result.status, result.message = str(verdict["status"]), str(verdict.get("message", ""))
    result.parts, result.printed = verdict.get("parts", []), str(verdict.get("printed", ""))
    result.notes += [f"{part['function']}: {note}" for part in result.parts for note in part.get("notes", ())]
    result.seconds = round(time.monotonic() - begun, 2)
    return result


def credit(verdict: dict[str, Any]) -> tuple[bool, int, bool]:
    """What orders two verdicts on an exercise: whether it passed, its right gradients, whether it ran in every case."""
    ran = [part for part in verdict.get("parts", []) if part.get("status") in CREDITED]
    right = sum(mark == "right" for part in ran for mark in part.get("gradients", {}).values())
    return verdict["status"] == "passed", right, verdict["status"] in CREDITED


def not_handed_in(submission: Submission, exercise: Exercise) -> str:
    """That an exercise is missing, and which files are of no exercise: one of them may be it."""
    others = ", ".join([printable(name) for name in submission.files if name not in ALL_FILES][:SHOWN])
    return f"{exercise.file} was not handed in" + (f"; of no exercise: {others}" if others else "")


def needs(exercise: Exercise) -> list[Exercise]:
    """The exercises whose files an exercise imports, directly or not."""
    found: dict[int, Exercise] = {}
    for number in exercise.needs:
        one = get_exercise(number)
        found |= {inner.number: inner for inner in needs(one)} | {number: one}
    return [found[number] for number in sorted(found)]


def is_as_given(submission: Submission, exercise: Exercise) -> bool:
    given = (COURSE / exercise.file).read_bytes()
    return submission.files[exercise.file].replace(b"\r\n", b"\n").strip() == given.replace(b"\r\n", b"\n").strip()


def with_solutions(submission: Submission, names: Iterable[str]) -> dict[str, bytes]:
    return {**submission.files, **{name: (SOLUTIONS / name).read_bytes() for name in names}}
