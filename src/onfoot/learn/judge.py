"""Judges an exercise: which gradients are right, which are wrong or not written yet, and which known mistake it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.isolated import TIMEOUT, DiedError, IsolatedFunction, RaisedError
from onfoot.check.known import check_layer
from onfoot.check.layer import Case
from onfoot.check.layouts import named_layout
from onfoot.check.report import LayerReport
from onfoot.learn.adapters import ADAPTERS
from onfoot.learn.course import Exercise, Part
from onfoot.learn.form import SAME, check_form_and_axes
from onfoot.learn.isolated import IsolatedExercise
from onfoot.learn.report import from_report
from onfoot.learn.verdict import PartVerdict, Verdict, overall

Start = Callable[[Path, str], IsolatedExercise]  # (file, adapter) -> the function in its process
Call = Callable[[Sequence[Any]], Any]  # arguments -> what the function returns


def judge(
    folder: Path,
    exercise: Exercise,
    timeout: float = TIMEOUT,
    start: Start | None = None,
    on_part: Callable[[str], None] = lambda words: None,
) -> Verdict:
    """Judges the file of an exercise in a folder. Each function runs in a process of its own.

    `on_part` is told which function is being judged: a wrong block may take a minute.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be > 0 seconds, got {timeout:g}")
    path = folder / exercise.file
    problem = unreadable(path)
    if problem is not None:
        return Verdict(exercise, *problem)
    parts = []
    for part in exercise.parts:
        on_part(f"checking {exercise.file}: {part.title}")
        try:
            parts.append(judge_part(path, part, timeout, start))
        except ValueError as error:  # the file cannot be imported
            return Verdict(exercise, "import", str(error))
    return Verdict(exercise, overall([part.status for part in parts]), parts=parts)


def unreadable(path: Path) -> tuple[str, str] | None:
    """The status and message of a file that is missing or not Python; None if it can be loaded."""
    if not path.is_file():
        return "missing", f"{path.name} is missing; this writes it again, unsolved: onfoot learn {path.parent}"
    try:
        compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        line = f"\n\n    {error.text.strip()}" if error.text else ""
        where = f" (line {error.lineno})" if error.lineno else ""
        return "syntax", f"{path.name} is not valid Python: {error.msg}{where}{line}"
    except ValueError as error:  # null bytes
        return "syntax", f"{path.name} is not valid Python: {error}"
    return None


def judge_part(path: Path, part: Part, timeout: float = TIMEOUT, start: Start | None = None) -> PartVerdict:
    """Judges one function; raises a ValueError if its file cannot be imported."""
    layer, options = part.layer, part.layer.with_options(part.options)
    case = first_case(layer, 0, options, ANY)
    with start(path, part.adapter) if start else IsolatedExercise(path, part.adapter, timeout) as function:
        changed = changed_forward(function, part, case)
        if changed:
            return PartVerdict(part, "changed", dict.fromkeys(layer.gradients, "not judged"), [changed])
        name = f"{path.name}:{part.function}"
        return judge_backward(part, function, lambda inputs: function.run(inputs, {}, "numpy"), name)


def judge_backward(part: Part, function: Any, call: Call, name: str) -> PartVerdict:
    """Judges the function to write, as the checker takes it; `call` gives what it returns for a list of arguments."""
    if is_unwritten(part, call):
        return PartVerdict(part, "unsolved", dict.fromkeys(part.layer.gradients, "None"))
    verdict = from_report(part, check_part(part, function, name))
    if not part.by_name and verdict.status == "passed":
        check_form_and_axes(verdict, call)
    return verdict


def check_part(part: Part, function: Any, name: str) -> LayerReport:
    """The checker's report on one function. The exercise says the layout: none other is recognised."""
    layout = "contract" if has_layouts(part) else "auto"
    return check_layer(
        part.layer, function, arrays="numpy", layout=layout, strict=part.strict, name=name, **part.options
    )


def has_layouts(part: Part) -> bool:
    """Whether a layer has layouts at all; of one whose axes have no names, the checker recognises none."""
    options = part.layer.with_options(part.options)
    try:
        named_layout("contract", part.layer, first_case(part.layer, 1, options, ANY), options)
    except (KeyError, ValueError):
        return False
    return True


def changed_forward(function: IsolatedFunction, part: Part, case: Case) -> str:
    """What is wrong with the given forward pass, or ""."""
    expected = ADAPTERS[part.adapter].expected
    if expected is None:
        return ""
    right = np.asarray(expected(*case.inputs))
    try:
        found = function.run(case.inputs, {"ask": "forward"}, "numpy")
    except (RaisedError, DiedError) as error:
        return f"the forward pass raises {error}"
    try:
        y = to_numpy(found).astype(np.float64)
    except (TypeError, ValueError):
        return "the forward pass no longer returns an array"
    if y.shape != right.shape:
        return f"the forward pass returns the shape {y.shape}; it was {right.shape}"
    if not np.allclose(y, right, rtol=SAME, atol=SAME * float(np.abs(right).max(initial=0))):
        return "the forward pass returns other values than the one that was given"
    return ""


def is_unwritten(part: Part, call: Call) -> bool:
    """Whether every gradient is None: nothing has been written yet."""
    case = first_case(part.layer, 0, part.layer.with_options(part.options), ANY)
    try:
        found = call(case.inputs)
    except Exception:
        return False  # the check says what was raised
    several = isinstance(found, (tuple, list))
    parts = list(found.values()) if isinstance(found, dict) else list(found) if several else [found]
    return bool(parts) and all(one is None for one in parts)
