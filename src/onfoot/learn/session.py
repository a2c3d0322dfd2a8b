"""What the commands do in a folder: check an exercise and those it builds on, give hints, watch for changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from onfoot.check.isolated import TIMEOUT
from onfoot.learn.course import EXERCISES, LEVELS, Exercise, foundations
from onfoot.learn.judge import judge
from onfoot.learn.progress import Progress, digest
from onfoot.learn.verdict import Verdict

SECONDS = 0.5  # between two looks at the files


def check_exercise(
    folder: Path, exercise: Exercise, timeout: float = TIMEOUT, say: Callable[[str], None] = lambda words: None
) -> Verdict:
    """Judges an exercise and records the verdict. The exercises that it imports must be right first.

    `say` is told what is being checked.
    """
    progress = Progress(folder)
    for needed in foundations(exercise):
        status = progress.status(needed)
        if status is None:  # not judged since the file was saved
            found = _judge_saved(folder, needed, timeout, say)
            progress.record(found)
            status = found.status
        if status == "saved":
            return Verdict(exercise, "saved", saved(needed, exercise))
        if status != "passed":
            verdict = Verdict(exercise, "blocked", blocked(exercise, needed))
            progress.record(verdict)
            return verdict
    verdict = _judge_saved(folder, exercise, timeout, say)
    progress.record(verdict)
    return verdict


def _judge_saved(folder: Path, exercise: Exercise, timeout: float, say: Callable[[str], None]) -> Verdict:
    """The verdict on a file; none if it, or one that it imports, was saved while it was judged."""
    files = [*foundations(exercise), exercise]
    before = [digest(folder / one.file) for one in files]
    verdict = judge(folder, exercise, timeout, on_part=say)
    for one, text in zip(files, before, strict=True):
        if digest(folder / one.file) != text:
            return Verdict(exercise, "saved", saved(one, exercise))
    return verdict


def saved(changed: Exercise, exercise: Exercise) -> str:
    return (
        f"{changed.file} was saved during the check, so that nothing is known of it as it is now. Check again: "
        f"onfoot learn check {exercise.number}"
    )


def blocked(exercise: Exercise, needed: Exercise) -> str:
    return (
        f"{exercise.file} is built from {needed.file}, which is not right yet. Solve exercise {needed.number} first: "
        f"onfoot learn check {needed.number}"
    )


def hint_text(folder: Path | None, exercise: Exercise, level: int | None = None) -> str:
    """The next hint of an exercise, or the one of a given level; all levels have been seen after the third.

    Without a folder, as beside notebooks, nothing is kept: the next hint is the first.
    """
    if level is not None and not 1 <= level <= LEVELS:
        raise ValueError(f"level must be 1 to {LEVELS}, got {level}")
    progress = None if folder is None else Progress(folder)
    level = level or min((progress.hints(exercise) if progress else 0) + 1, LEVELS)
    if progress is not None:
        progress.saw_hint(exercise, level)
    one_more = "" if progress is not None else f" --level {level + 1}"
    after = (
        f"The next hint says more: onfoot learn hint {exercise.number}{one_more}"
        if level < LEVELS
        else f"That was the last hint. The whole derivation: {exercise.derivation}"
    )
    return f"Exercise {exercise.number} · hint {level} of {LEVELS}\n\n{exercise.hint(level)}\n\n{after}"


def changed_files(folder: Path, pause: Callable[[float], None] = time.sleep) -> Iterator[Exercise]:
    """The exercise of each file that is saved from now on, forever; the files are looked at twice per second."""

    def seen() -> dict[Exercise, tuple[int, int] | None]:
        return {exercise: _stamp(folder / exercise.file) for exercise in EXERCISES}

    def changes(before: dict[Exercise, tuple[int, int] | None]) -> Iterator[Exercise]:
        while True:
            pause(SECONDS)
            now = seen()
            for exercise, stamp in now.items():
                if stamp != before[exercise] and stamp is not None:
                    yield exercise
            before = now

    return changes(seen())


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # an editor replaces the file
        return None
    return found.st_mtime_ns, found.st_size
