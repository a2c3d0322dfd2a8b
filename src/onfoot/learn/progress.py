"""What a learner has solved: `progress.json` in the folder of exercises."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from onfoot.formats.write import write_json
from onfoot.learn.course import EXERCISES, Exercise
from onfoot.learn.verdict import Verdict
from onfoot.terminal import shell_word

FILE = "progress.json"
FORMAT = 1
TRAIN = "onfoot learn train"
NOTES = {"passed": "", None: "  (changed since it was solved)"}  # status of a solved exercise -> note on the map


def digest(path: Path) -> str:
    """The SHA-256 of a file's text, with any line endings; "" if there is no such file."""
    if not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


class Progress:
    """The progress in a folder. It is written after every change, as a whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / FILE
        self.exercises: dict[str, dict[str, Any]] = {}  # by name, so that it survives another numbering
        self.given: dict[str, str] = {}  # file -> the SHA-256 of the text that was given
        if self.path.is_file():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            self.exercises, self.given = dict(found["exercises"]), dict(found["given"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self.path} cannot be read; delete it and run onfoot learn {shell_word(self.folder)}: your files "
                f"stay as they are, and onfoot learn check --all finds what is solved"
            ) from None

    def save(self) -> None:
        write_json(self.path, {"format": FORMAT, "exercises": self.exercises, "given": self.given})

    def of(self, exercise: Exercise) -> dict[str, Any]:
        return self.exercises.setdefault(exercise.name, {})

    def record(self, verdict: Verdict) -> None:
        """Keeps a verdict, unless its file was saved on the way.

        An exercise once solved stays solved; a later mistake is kept beside it.
        """
        if verdict.status == "saved":
            return
        kept = self.of(verdict.exercise)
        kept["checks"] = kept.get("checks", 0) + 1
        kept["status"] = verdict.status
        kept["sha256"] = digest(self.folder / verdict.exercise.file)
        marks = [mark for part in verdict.parts for mark in part.marks.values()]
        kept["right"], kept["gradients"] = marks.count("right"), len(marks)
        if verdict.passed:
            kept.setdefault("solved", time.strftime("%Y-%m-%dT%H:%M:%S"))
        self.save()

    def hints(self, exercise: Exercise) -> int:
        """How many hints of an exercise have been asked for."""
        return int(self.exercises.get(exercise.name, {}).get("hints", 0))

    def saw_hint(self, exercise: Exercise, level: int) -> None:
        self.of(exercise)["hints"] = max(level, self.hints(exercise))
        self.save()

    def solved(self, exercise: Exercise) -> bool:
        return "solved" in self.exercises.get(exercise.name, {})

    def status(self, exercise: Exercise) -> str | None:
        """What was found about the file as it is now; None if it has not been judged since it was changed."""
        kept = self.exercises.get(exercise.name, {})
        same = kept.get("sha256") == digest(self.folder / exercise.file)
        return str(kept["status"]) if same and kept.get("status") not in (None, "blocked", "missing") else None

    def current(self) -> Exercise:
        """The first exercise that is not solved, or the last one."""
        return next((one for one in EXERCISES if not self.solved(one)), EXERCISES[-1])


def map_text(progress: Progress) -> str:
    """All exercises with what is solved, and where to go on."""
    solved = sum(progress.solved(one) for one in EXERCISES)
    lines = [f"{solved} of {len(EXERCISES)} exercises solved", ""]
    width = max(len(one.stem) for one in EXERCISES) + 2
    for exercise in EXERCISES:
        lines.append(
            f"  {_sign(progress, exercise)} {exercise.stem:<{width}}{exercise.title}{_note(progress, exercise)}"
        )
    if solved == len(EXERCISES):
        return "\n".join([*lines, "", f"Every exercise is solved. Train a GPT-2 with your gradients: {TRAIN}"])
    if solved:
        lines += ["", f"Train with what is yours so far: {TRAIN}"]
    number = progress.current().number
    return "\n".join([*lines, "", f"Go on with: onfoot learn check {number}"])


def _sign(progress: Progress, exercise: Exercise) -> str:
    if progress.solved(exercise):
        return "✓"
    return "▸" if exercise == progress.current() else "·"


def _note(progress: Progress, exercise: Exercise) -> str:
    kept = progress.exercises.get(exercise.name, {})
    if progress.solved(exercise):
        status = progress.status(exercise)
        return NOTES.get(status, "  (solved before; not right as it is now)")
    if kept.get("right"):
        return f"  ({kept['right']} of {kept['gradients']} right)"
    return ""
