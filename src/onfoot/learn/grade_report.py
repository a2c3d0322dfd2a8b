"""What a batch of results means: points, a table, a gradebook, and the mistakes that were most frequent."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onfoot.learn.course import EXERCISES, Exercise
from onfoot.learn.grade import CREDITED, Result
from onfoot.terminal import printable

SIGNS = {"passed": "✓", "partial": "◐", "wrong": "✗", "unsolved": "·", "missing": "–", "not graded": "?"}
FAILED = "!"  # it raises, crashes, does not end, cannot be imported, has another forward pass
WORDS = {
    "passed": "solved",
    "partial": "right so far",
    "wrong": "wrong",
    "unsolved": "not begun",
    "missing": "not handed in",
    "failed": "fails",
    "changed": "the given forward pass was changed",
    "syntax": "not valid Python",
    "import": "cannot be imported",
    "not graded": "not graded",
}
NAMED_BY_MESSAGE = ("syntax", "import")  # the message is a whole sentence


@dataclass(frozen=True)
class Points:
    """How many points an exercise has, and whether a part of it counts."""

    full: dict[str, float] = field(default_factory=dict)  # by name; 1 if not given
    partial: bool = False  # the share of the gradients that are right

    def most(self, exercise: str) -> float:
        return self.full.get(exercise, 1.0)

    def of(self, result: Result) -> float:
        """The points of a result, to the hundredth."""
        if result.passed:
            return self.most(result.exercise)
        return round(self.most(result.exercise) * share_right(result), 2) if self.partial else 0.0


def share_right(result: Result) -> float:
    """The share of the gradients that are right, of functions that ran in every case."""
    marks = list(result.gradients.values())
    right = [
        mark
        for part in result.parts
        if part.get("status") in CREDITED
        for mark in part.get("gradients", {}).values()
        if mark == "right"
    ]
    return len(right) / len(marks) if marks else 0.0


def read_points(path: Path, partial: bool = False) -> Points:
    """Points from a JSON file: {"linear": 10, "2": 5}, by name or number of the exercise."""
    names = {one.name: one.name for one in EXERCISES} | {str(one.number): one.name for one in EXERCISES}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'{path} must be an object such as {{"linear": 10, "2": 5}}')
    for key, value in found.items():
        if key not in names:
            raise ValueError(f"{path}: there is no exercise {key!r}; expected a name or a number, such as linear or 1")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"{path}: points of {key!r} must be a number >= 0, got {value!r}")
    return Points({names[key]: float(value) for key, value in found.items()}, partial)


@dataclass
class Gradebook:
    """The results of a batch by student and exercise, with points."""

    results: list[Result]
    points: Points = field(default_factory=Points)

    @property
    def exercises(self) -> list[Exercise]:
        names = {result.exercise for result in self.results}
        return [exercise for exercise in EXERCISES if exercise.name in names]

    @property
    def students(self) -> dict[str, dict[str, Result]]:
        """The results of each student, by the name of the exercise."""
        found: dict[str, dict[str, Result]] = {}
        for result in self.results:
            found.setdefault(result.student, {})[result.exercise] = result
        return found

    @property
    def most(self) -> float:
        return sum(self.points.most(exercise.name) for exercise in self.exercises)

    def total(self, results: Iterable[Result]) -> float:
        return round(sum(self.points.of(result) for result in results), 2)

    def frequent(self) -> list[tuple[Exercise, str, list[str]]]:
        """(exercise, mistake, students), the most frequent mistakes first."""
        found: dict[tuple[str, str], list[str]] = {}
        for result in self.results:
            if result.status in ("passed", "missing", "unsolved", "partial"):
                continue
            for mistake in dict.fromkeys(general(text) for text in result.mistakes):
                found.setdefault((result.exercise, mistake), []).append(result.student)
        by_name = {exercise.name: exercise for exercise in self.exercises}
        listed = [(by_name[name], mistake, students) for (name, mistake), students in found.items()]
        return sorted(listed, key=lambda one: (-len(one[2]), one[0].number, one[1]))

    def counts(self, exercise: Exercise) -> dict[str, int]:
        """How many students have which status."""
        found: dict[str, int] = {}
        for result in self.results:
            if result.exercise == exercise.name:
                found[result.status] = found.get(result.status, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "exercises": [
                {
                    "number": one.number,
                    "name": one.name,
                    "points": self.points.most(one.name),
                    "status": self.counts(one),
                }
                for one in self.exercises
            ],
            "students": [
                {
                    "student": student,
                    "points": self.total(results.values()),
                    "of": self.most,
                    "results": [result_dict(result, self.points) for result in results.values()],
                }
                for student, results in self.students.items()
            ],
            "mistakes": [
                {"exercise": one.name, "mistake": mistake, "students": students}
                for one, mistake, students in self.frequent()
            ],
        }

    def to_csv(self) -> str:
        """A row per student: the points of each exercise, their sum, and every mistake."""
        out = io.StringIO()
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["student", *(f"{one.number} {one.name}" for one in self.exercises), "points", "of", "mistakes"])
        for student, results in self.students.items():
            found = [results[one.name] for one in self.exercises]
            wrong = "; ".join(f"{result.number}: {what(result)}" for result in found if not result.passed)
            points = [f"{self.points.of(result):g}" for result in found]
            rows.writerow([cell(student), *points, f"{self.total(found):g}", f"{self.most:g}", cell(wrong)])
        return out.getvalue()


def result_dict(result: Result, points: Points) -> dict[str, Any]:
    return {
        "exercise": result.number,
        "name": result.exercise,
        "status": result.status,
        "points": points.of(result),
        "of": points.most(result.exercise),
        "mistakes": result.mistakes if not result.passed else [],
        "message": result.message,
        "parts": result.parts,
        "notes": result.notes,
        "printed": result.printed,
        "seconds": result.seconds,
    }


def sign(result: Result) -> str:
    return SIGNS.get(result.status, FAILED)


def what(result: Result) -> str:
    """What was found, in one line."""
    word = WORDS.get(result.status, result.status)
    if result.status in ("passed", "unsolved", "missing"):
        return word
    if result.status == "partial":
        return f"{word}: {', '.join(name for name, mark in result.gradients.items() if mark == 'right')}"
    mistakes = "; ".join(dict.fromkeys(general(text) for text in result.mistakes))
    if result.status in NAMED_BY_MESSAGE and mistakes:
        return " ".join(mistakes.split())
    return f"{word}: {' '.join(mistakes.split())}" if mistakes else word


def general(mistake: str) -> str:
    """A mistake without the line and the shapes at which it was seen, so that those of several students are equal."""
    return re.sub(r"; called with .*| \([^()]*, line \d+\)", "", mistake, flags=re.DOTALL)


def cell(text: str) -> str:
    """Text for a spreadsheet: one that it would take for a formula gets an apostrophe."""
    text = printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def sheet_rows(book: Gradebook) -> tuple[list[str], list[tuple[str, ...]]]:
    """The columns and rows of the table on the terminal."""
    columns = ["student", *(str(one.number) for one in book.exercises), ">points"]
    rows = [
        (
            student,
            *(sign(results[one.name]) for one in book.exercises),
            f"{book.total(results.values()):g} of {book.most:g}",
        )
        for student, results in book.students.items()
    ]
    return columns, rows


def explain_signs(results: Sequence[Result]) -> str:
    """What the signs in use mean."""
    words = {sign(result): WORDS.get(result.status, "") for result in results}
    if FAILED in words:
        words[FAILED] = "cannot be judged: it raises, crashes, does not end, or is not as given"
    return ", ".join(f"{mark} {word}" for mark, word in words.items())
