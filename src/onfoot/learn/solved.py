"""Judges functions of this process, as a notebook has them: `assert_solved("linear", linear_backward)`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from onfoot.check.known import check_layer
from onfoot.learn.adapters import ADAPTERS
from onfoot.learn.answer import first_sentence, part_lines
from onfoot.learn.course import EXERCISES, Exercise, Part
from onfoot.learn.judge import PartVerdict, Verdict, from_report, overall


def assert_solved(name: str, *functions: Callable[..., Any], quiet: bool = False) -> None:
    """Raises an AssertionError that says what is wrong, unless these functions solve the exercise of that name.

    The functions to write are passed; the given forward passes are found where these were defined.
    """
    exercise = find_exercise(name)
    wanted = exercise.functions
    given = {getattr(function, "__name__", ""): function for function in functions}
    missing = [function for function in wanted if not callable(given.get(function))]
    if missing:
        raise ValueError(f"exercise {name!r} needs {', '.join(wanted)}; {', '.join(missing)} was not passed")
    module = SimpleNamespace(**_namespace(given[wanted[0]]) | given)
    parts = [judge_here(module, part) for part in exercise.parts]
    verdict = Verdict(exercise, overall([part.status for part in parts]), parts=parts)
    if verdict.passed:
        if not quiet:
            print(first_sentence(verdict))
        return
    lines = [first_sentence(verdict), *(line for part in parts for line in ("", *part_lines(part)))]
    raise AssertionError("\n".join(lines))


def find_exercise(name: str) -> Exercise:
    for exercise in EXERCISES:
        if name in (exercise.name, exercise.stem, str(exercise.number)):
            return exercise
    raise ValueError(f"there is no exercise {name!r}; they are {', '.join(one.name for one in EXERCISES)}")


def _namespace(function: Any) -> dict[str, Any]:
    """What is defined beside a function."""
    return {key: value for key, value in getattr(function, "__globals__", {}).items() if key.isidentifier()}


def judge_here(module: Any, part: Part) -> PartVerdict:
    """Judges one function in this process."""
    adapter = ADAPTERS[part.adapter]

    def function(*arguments: Any) -> Any:
        return adapter.backward(module, *arguments)

    try:
        report = check_layer(
            part.layer, function, arrays="numpy", strict=part.strict, name=part.function, **part.options
        )
    except AttributeError as error:
        raise ValueError(f"{error}; run the cell with the whole exercise first") from None
    verdict = from_report(part, report)
    if all(mark == "None" for mark in verdict.marks.values()) or _returns_none(report):
        return PartVerdict(part, "unsolved", dict.fromkeys(part.layer.gradients, "None"))
    return verdict


def _returns_none(report: Any) -> bool:
    outcomes = report.outcomes
    return bool(outcomes) and all(
        not outcome.answer.given and any("returns None" in p.message for p in outcome.answer.problems)
        for outcome in outcomes
    )
