"""Judges functions of this process, as a notebook has them: `assert_solved("linear", linear_backward)`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from onfoot.learn.adapters import ADAPTERS, missing_functions
from onfoot.learn.answer import first_sentence, note_lines, part_lines
from onfoot.learn.course import Exercise, Part, find_exercise, foundations
from onfoot.learn.judge import Call, is_unwritten, judge_backward
from onfoot.learn.verdict import PartVerdict, Verdict, overall
from onfoot.terminal import listed


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
    if verdict.status in ("wrong", "failed"):
        refuse_unwritten_foundation(exercise)
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
    missing = missing_functions(module, part.adapter)
    if missing:
        raise ValueError(f"{missing[0]} is not defined here; run the cell with the whole exercise first")
    call = _call_here(module, part)

    def function(*arguments: Any) -> Any:
        return call(arguments)

    function.__name__ = part.function
    return judge_backward(part, function, call, part.function)


def _call_here(module: Any, part: Part) -> Call:
    """Calls a function of this process with the arguments of the checker's layer."""
    return lambda arguments: ADAPTERS[part.adapter].backward(module, *arguments)


def refuse_unwritten_foundation(exercise: Exercise) -> None:
    """Raises an AssertionError if an exercise that this one has imported is not written: it fails whatever is right."""
    for one in foundations(exercise):
        module = sys.modules.get(one.stem)  # None, which has no functions, if it is not imported
        here = [part for part in one.parts if not missing_functions(module, part.adapter)]
        unwritten = [part.function for part in here if is_unwritten(part, _call_here(module, part))]
        if unwritten:
            raise AssertionError(
                f"{listed(exercise.functions)} cannot be judged yet: {listed(list(dict.fromkeys(unwritten)))} of "
                f"{one.stem}, on which it builds, is not written yet. Solve exercise {one.number} first, then run this "
                f"notebook again from its start."
            )
