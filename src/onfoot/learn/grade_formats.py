"""Results and tests for other graders: Gradescope's results.json, and tests in Otter's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onfoot.learn.course import EXERCISES, Exercise
from onfoot.learn.grade import Result
from onfoot.learn.grade_report import NAMED_BY_MESSAGE, WORDS, Gradebook, Points
from onfoot.terminal import printable


def gradescope(book: Gradebook) -> dict[str, Any]:
    """The content of Gradescope's results.json, for one submission; what a student sees names every mistake."""
    if len(book.students) != 1:
        raise ValueError(f"Gradescope grades one submission at a time, got {len(book.students)}")
    (results,) = book.students.values()
    return {
        "output_format": "text",
        "visibility": "visible",
        "tests": [
            {
                "number": str(result.number),
                "name": f"Exercise {result.number}: {result.exercise}",
                "score": book.points.of(result),
                "max_score": book.points.most(result.exercise),
                "status": "passed" if result.passed else "failed",
                "output": feedback(result),
            }
            for result in results.values()
        ],
    }


def feedback(result: Result) -> str:
    """What a student is told about an exercise: the marks, then each mistake with its explanation."""
    word = WORDS.get(result.status, result.status)
    whole = result.status in NAMED_BY_MESSAGE and result.message
    lines = [result.message if whole else word + (f": {result.message}" if result.message else "")]
    lines += result.notes if result.status == "missing" else []  # what was handed in under another name
    for part in result.parts:
        marks = [f"{name} {'not written' if mark == 'None' else mark}" for name, mark in part["gradients"].items()]
        lines.append(f"{part['function']}: {', '.join(marks)}")
        lines += [f"  {problem}" for problem in part["problems"]]
        lines += [f"  {name}. {why}" for name, why in zip(part["mistakes"], part["explained"], strict=False)]
        lines += [f"  Where the chain breaks: {part['chain']}"] if part.get("chain") else []
    return printable("\n".join(lines))


def otter_test(exercise: Exercise, points: float = 1.0) -> str:
    """A test file of Otter, in the format of doctests, for a notebook of the exercise."""
    functions = ", ".join(exercise.functions)
    call = (
        f"onfoot.learn.assert_solved({exercise.name!r}, {functions}, quiet=True)"  # a doctest compares what is printed
    )
    case = {"code": f">>> import onfoot.learn\n>>> {call}\n", "hidden": False, "locked": False}
    suite = {"cases": [case], "scored": True, "setup": "", "teardown": "", "type": "doctest"}
    test = {"name": exercise.stem, "points": points, "suites": [suite]}
    return f"OK_FORMAT = True\n\ntest = {test!r}\n"


def write_otter_tests(folder: Path, points: Points | None = None) -> list[str]:
    """Writes a test file per exercise to a folder; returns the names."""
    points = points or Points()
    folder.mkdir(parents=True, exist_ok=True)
    for exercise in EXERCISES:
        text = otter_test(exercise, points.most(exercise.name))
        (folder / f"{exercise.stem}.py").write_text(text, encoding="utf-8")
    return [f"{exercise.stem}.py" for exercise in EXERCISES]
