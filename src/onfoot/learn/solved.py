"""Judges functions of this process, as a notebook has them: `assert_solved("linear", linear_backward)`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from onfoot.learn.adapters import ADAPTERS, missing_functions
from onfoot.learn.answer import first_sentence, note_lines, part_lines
from onfoot.learn.course import Part, find_exercise
from onfoot.learn.judge import PartVerdict, Verdict, check_part, from_report, overall, refuse_three_axes_only


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
            notes = [line for part in parts for line in note_lines(part)]
            print("\n".join([first_sentence(verdict), *notes]))
        return
    first = first_sentence(verdict)
    lines = [first, *(line for part in parts for line in ("", *part_lines(part, first)))]
    lines += ["", f"A hint, in a terminal:  onfoot learn hint {exercise.number}"]
    lines += [f"The whole derivation:   {exercise.derivation}"]
    raise AssertionError("\n".join(lines))


def _namespace(function: Any) -> dict[str, Any]:
    """What is defined beside a function."""
    return {key: value for key, value in getattr(function, "__globals__", {}).items() if key.isidentifier()}


def judge_here(module: Any, part: Part) -> PartVerdict:
    """Judges one function in this process."""
    adapter = ADAPTERS[part.adapter]

    def function(*arguments: Any) -> Any:
        return adapter.backward(module, *arguments)

    missing = missing_functions(module, part.adapter)
    if missing:
        raise ValueError(f"{missing[0]} is not defined here; run the cell with the whole exercise first")
    report = check_part(part, function, part.function)
    verdict = from_report(part, report)
    if all(mark == "None" for mark in verdict.marks.values()) or _returns_none(report):
        return PartVerdict(part, "unsolved", dict.fromkeys(part.layer.gradients, "None"))
    if part.rows and verdict.status == "passed":
        refuse_three_axes_only(verdict, lambda inputs: function(*inputs))
    return verdict


def _returns_none(report: Any) -> bool:
    outcomes = report.outcomes
    return bool(outcomes) and all(
        not outcome.answer.given and any("returns None" in p.message for p in outcome.answer.problems)
        for outcome in outcomes
    )
