"""Judges an exercise: which gradients are right, which are wrong or not written yet, and which known mistake it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.isolated import TIMEOUT, DiedError, IsolatedFunction, RaisedError
from onfoot.check.known import check_layer
from onfoot.check.layer import Case
from onfoot.check.report import LayerReport
from onfoot.learn.adapters import ADAPTERS
from onfoot.learn.course import Exercise, Part
from onfoot.learn.isolated import IsolatedExercise

Start = Callable[[Path, str], IsolatedExercise]  # (file, adapter) -> the function in its process
NOT_FINITE = (
    "Look for 0/0, ∞ − ∞ or 0 · ∞. What is masked or left out has the gradient 0: it must not become ∞, "
    "even where the forward pass has −∞."
)
SAME = 1e-9  # relative difference up to which a given forward pass is unchanged


@dataclass
class PartVerdict:
    """What was found about one function."""

    part: Part
    status: str  # passed | partial | unsolved | wrong | failed | changed
    marks: dict[str, str] = field(default_factory=dict)  # gradient -> right | wrong | None | not judged
    problems: list[str] = field(default_factory=list)  # what the function does wrong beside values: raises, shapes, nan
    mistakes: list[str] = field(default_factory=list)  # the known mistakes, by name
    explained: list[str] = field(default_factory=list)  # a sentence for each
    report: LayerReport | None = None

    def marked(self, mark: str) -> list[str]:
        """The gradients with that mark."""
        return [name for name, found in self.marks.items() if found == mark]


@dataclass
class Verdict:
    """What was found about an exercise; the parts are empty if its file could not be loaded."""

    exercise: Exercise
    status: str  # passed | partial | unsolved | wrong | failed | changed | missing | syntax | import | blocked
    message: str = ""  # why there are no parts
    parts: list[PartVerdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """The verdict for programs."""
        return {
            "exercise": self.exercise.number,
            "name": self.exercise.name,
            "passed": self.passed,
            "status": self.status,
            "message": self.message,
            "parts": [
                {
                    "function": part.part.function,
                    "status": part.status,
                    "gradients": part.marks,
                    "problems": part.problems,
                    "mistakes": part.mistakes,
                    "explained": part.explained,
                }
                for part in self.parts
            ],
        }


def judge(folder: Path, exercise: Exercise, timeout: float = TIMEOUT, start: Start | None = None) -> Verdict:
    """Judges the file of an exercise in a folder. Each function runs in a process of its own."""
    if not timeout > 0:
        raise ValueError(f"timeout must be > 0 seconds, got {timeout:g}")
    path = folder / exercise.file
    problem = unreadable(path)
    if problem is not None:
        return Verdict(exercise, *problem)
    parts = []
    for part in exercise.parts:
        try:
            parts.append(judge_part(path, part, timeout, start))
        except ValueError as error:  # the file cannot be imported
            return Verdict(exercise, "import", str(error))
    return Verdict(exercise, overall([part.status for part in parts]), parts=parts)


def overall(statuses: Sequence[str]) -> str:
    """The status of an exercise from those of its parts: the worst, but partial if some are solved and some not."""
    for status in ("changed", "failed", "wrong", "partial"):
        if status in statuses:
            return status
    if "unsolved" in statuses:
        return "partial" if "passed" in statuses else "unsolved"
    return "passed"


def unreadable(path: Path) -> tuple[str, str] | None:
    """The status and message of a file that is missing or not Python; None if it can be loaded."""
    if not path.is_file():
        return "missing", f"{path.name} is missing; this writes it again, unsolved: onfoot learn {path.parent}"
    try:
        compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        line = f"\n\n    {error.text.strip()}" if error.text else ""
        return "syntax", f"{path.name} is not valid Python: {error.msg} (line {error.lineno}){line}"
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
        if returns_nothing(function, case):
            return PartVerdict(part, "unsolved", dict.fromkeys(layer.gradients, "None"))
        name = f"{path.name}:{part.function}"
        report = check_layer(layer, function, arrays="numpy", strict=part.strict, name=name, **part.options)
    return from_report(part, report)


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


def returns_nothing(function: IsolatedFunction, case: Case) -> bool:
    """Whether every gradient is None: nothing has been written yet."""
    try:
        found = function.run(case.inputs, {}, "numpy")
    except (RaisedError, DiedError):
        return False  # the check says what was raised
    parts = list(found.values()) if isinstance(found, dict) else list(found) if isinstance(found, tuple) else [found]
    return all(one is None for one in parts)


def from_report(part: Part, report: LayerReport) -> PartVerdict:
    """The verdict that a report of the checker means."""
    marks = {name: mark(report, name) for name in part.layer.gradients}
    found = {p.kind: described(p.kind, p.message) for o in reversed(report.failed) for p in reversed(o.problems)}
    problems = list(reversed(found.values()))  # the first of each kind: later cases differ only in their sizes
    verdict = PartVerdict(part, "passed", marks, problems, report=report)
    if not report.passed:
        verdict.status = "wrong" if report.wrong or "wrong" in marks.values() else "failed"
        for finding in report.diagnosis.findings if report.diagnosis is not None else ():
            verdict.mistakes.append(finding.name)
            verdict.explained.append(finding.explains)
        if not verdict.mistakes and any(kind == "nan" for kind in found):
            verdict.mistakes.append("a value that is not finite")
            verdict.explained.append(NOT_FINITE)
    elif report.not_given:
        verdict.status = "partial"
    return verdict


def described(kind: str, message: str) -> str:
    return f"it raises {message}" if kind == "raises" else message


def mark(report: LayerReport, name: str) -> str:
    """Whether a gradient is right, wrong, None, or could not be judged."""
    if name in report.not_given:
        return "None"
    outcomes = [o for o in report.outcomes if report.counts(o)]
    measured = [m for o in outcomes for m in o.measured if m.gradient == name]
    if name in report.wrong:
        return "wrong"
    wrong_shape = any(p.kind == "shape" and p.message.startswith(f"{name} ") for o in outcomes for p in o.problems)
    if wrong_shape:
        return "wrong"
    judged = [o for o in outcomes if not any(p.kind in ("raises", "crash", "timeout", "exit") for p in o.problems)]
    return "right" if measured and judged else "not judged"
