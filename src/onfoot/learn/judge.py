"""Judges an exercise: which gradients are right, which are wrong or not written yet, and which known mistake it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from onfoot.learn.adapters import ADAPTERS, WrongReturnError
from onfoot.learn.course import Exercise, Part
from onfoot.learn.isolated import IsolatedExercise
from onfoot.learn.words import factor_words, own_words

Start = Callable[[Path, str], IsolatedExercise]  # (file, adapter) -> the function in its process
NOT_FINITE = (
    "Look for 0/0, ∞ − ∞ or 0 · ∞. What is masked or left out has the gradient 0: it must not become ∞, "
    "even where the forward pass has −∞."
)
LEADING_AXES = (  # by the number of axes that are the function's own
    "There may be any number of axes, (tokens), (batch, tokens), …: go through all ids, whatever their shape.",
    "There may be several leading axes, (batch, tokens, features): make one row per token of them first.",
    "There may be any number of leading axes, or none: count the axes from the last one, as in swapaxes(-1, -2).",
)
INEXACT = "{} only as accurate as float32"
INEXACT_WHY = (
    "The inputs are float64, and the error is that of float32 or larger. Write the derivative itself: a numerical "
    "difference, an added constant such as 1e-6 or a step in float32 is not exact."
)
ABOUT_THE_CHECK = (  # warnings that say nothing about the function, or what is said already
    "run in ", "not run", "float64 is only as accurate", "the diagnosis leaves out", "if it takes certain sizes",
    "its name is that of",
)  # fmt: skip
OUR_LINE = re.compile(r" \(adapters\.py, line \d+\)")
WRONG_RETURN = f"{WrongReturnError.__name__}: "  # of an adapter: not raised by the learner's function
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
    chain: str = ""  # where the chain of gradients of several layers breaks, if that is certain
    notes: list[str] = field(default_factory=list)  # what is not wrong, but should be known: it changes an argument
    report: LayerReport | None = None

    def marked(self, mark: str) -> list[str]:
        """The gradients with that mark."""
        return [name for name, found in self.marks.items() if found == mark]


@dataclass
class Verdict:
    """What was found about an exercise; the parts are empty if its file could not be loaded."""

    exercise: Exercise
    status: str  # passed | partial | unsolved | wrong | failed | changed | missing | syntax | import | blocked | saved
    message: str = ""  # why there are no parts
    parts: list[PartVerdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every gradient is right."""
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
                    "chain": part.chain,
                    "notes": part.notes,
                }
                for part in self.parts
            ],
        }


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
        if returns_nothing(function, case):
            return PartVerdict(part, "unsolved", dict.fromkeys(layer.gradients, "None"))
        name = f"{path.name}:{part.function}"
        verdict = from_report(part, check_part(part, function, name))
        if not part.by_name and verdict.status == "passed":
            check_form_and_axes(verdict, lambda inputs: function.run(inputs, {}, "numpy"))
    return verdict


def check_part(part: Part, function: Any, name: str) -> LayerReport:
    """The checker's report on one function. The exercise says the layout: none other is recognised."""
    layout = "contract" if has_layouts(part) else "auto"
    return check_layer(
        part.layer, function, arrays="numpy", layout=layout, strict=part.strict, name=name, **part.options
    )


def check_form_and_axes(verdict: PartVerdict, call: Callable[[Sequence[Any]], Any]) -> None:
    """Calls a function that is right in the cases again: it must return arrays, and take any number of leading axes."""
    part, options = verdict.part, verdict.part.layer.with_options(verdict.part.options)
    names = part.layer.gradients
    case = first_case(part.layer, 0, options, ANY)
    for inputs in (list(case.inputs), *with_other_axes(part, case)):
        try:
            found = call([x.copy() if isinstance(x, np.ndarray) else x for x in inputs])
        except Exception as error:  # the learner's function, in whatever way
            verdict.status, verdict.marks = "failed", dict.fromkeys(names, "not judged")
            said = str(error) if isinstance(error, (RaisedError, DiedError)) else f"{type(error).__name__}: {error}"
            said = OUR_LINE.sub("", said)
            verdict.problems.append(f"with {part.layer.arguments[0]} of shape {inputs[0].shape} it raises {said}")
            refuse(verdict, f"{part.function} fits only some of the shapes", leading_axes(part))
            return
        form = wrong_form(part, found)
        if form:
            verdict.status, verdict.marks = "wrong", dict.fromkeys(names, "wrong")
            refuse(verdict, *form)
            return
        given, right = [found] if len(names) == 1 else found, part.layer.reference(*inputs, **options)
        wrong = [name for name, g, r in zip(names, given, right, strict=True) if not is_same(g, r)]
        if wrong:
            verdict.status = "wrong"
            verdict.marks |= dict.fromkeys(wrong, "wrong")
            refuse(verdict, f"{', '.join(wrong)} fits only some of the shapes", leading_axes(part))
            return


def refuse(verdict: PartVerdict, mistake: str, explained: str) -> None:
    """Adds a mistake to a verdict."""
    verdict.mistakes.append(mistake)
    verdict.explained.append(explained)


def leading_axes(part: Part) -> str:
    """What an answer that fits only some of the shapes must take."""
    return LEADING_AXES[1 if part.axes is None else part.axes]


def with_other_axes(part: Part, case: Case) -> Iterator[list[Any]]:
    """The inputs of a case with none, one and one more leading axis than it has, where the function must take these."""
    if part.axes is None:
        return
    n = case.inputs[0].ndim - part.axes
    lead = case.inputs[0].shape[:n]

    def changed(change: Callable[[Any], Any]) -> list[Any]:
        return [change(x) if isinstance(x, np.ndarray) and x.shape[:n] == lead else x for x in case.inputs]

    if part.axes > 1:  # a single matrix; a single token or id is not asked for
        yield changed(lambda x: x[(0,) * n])
    yield changed(lambda x: x.reshape(-1, *x.shape[n:]))
    yield changed(lambda x: np.stack([x, x[::-1]]))


def wrong_form(part: Part, found: Any) -> tuple[str, str] | None:
    """The mistake and its explanation, if the gradients are not returned as other exercises and training take them."""
    names = [own_words(name, part.function) for name in part.layer.gradients]
    what = type(found).__name__
    kind = f"{part.function} returns a {what}"
    if len(names) == 1:
        inside = isinstance(found, (tuple, list, dict))
        return (kind, f"Return {names[0]} itself, not a {what}.") if inside else None
    if isinstance(found, dict):
        return kind, f"Return {', '.join(names)} without names, in this order."
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        n = len(found) if isinstance(found, (tuple, list)) else 1
        return f"{part.function} returns {n} values", f"Return {', '.join(names)}, in this order, and nothing else."
    return None


def is_same(found: Any, right: Any) -> bool:
    """Whether it is that array, up to rounding."""
    try:
        given = to_numpy(found)
        return given.shape == right.shape and np.allclose(given, right, rtol=SAME, atol=SAME)
    except (TypeError, ValueError, AttributeError):  # a text, or lists of several lengths
        return False


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


def returns_nothing(function: IsolatedFunction, case: Case) -> bool:
    """Whether every gradient is None: nothing has been written yet."""
    try:
        found = function.run(case.inputs, {}, "numpy")
    except (RaisedError, DiedError):
        return False  # the check says what was raised
    several = isinstance(found, (tuple, list))
    parts = list(found.values()) if isinstance(found, dict) else list(found) if several else [found]
    return bool(parts) and all(one is None for one in parts)


def from_report(part: Part, report: LayerReport) -> PartVerdict:
    """The verdict that a report of the checker means."""
    marks = {name: mark(report, name) for name in part.layer.gradients}
    missing = unwritten(report)
    marks |= dict.fromkeys(missing, "None")
    swapped = other_order(report)
    marks |= dict.fromkeys(swapped, "wrong")
    found = {p.kind: described(p.kind, p.message) for o in reversed(report.failed) for p in reversed(o.problems)}
    if missing and len(found) > 1:
        found.pop("count")  # its row says so
    problems = [
        own_words(OUR_LINE.sub("", one), part.function) for one in reversed(found.values())
    ]  # the first of each kind: later cases differ only in their sizes
    warnings = [OUR_LINE.sub("", one) for one in report.warnings]
    notes = [own_words(one, part.function) for one in warnings if not one.startswith(ABOUT_THE_CHECK)]
    verdict = PartVerdict(part, "passed", marks, problems, notes=notes, report=report)
    if not report.passed:
        verdict.status = "wrong" if report.wrong or "wrong" in marks.values() else "failed"
        for finding in report.diagnosis.findings if report.diagnosis is not None else ():
            name = own_words(finding.name, part.function)
            if "but for its shape" in name and "raises" in found:  # right in a case where two axes are as good as three
                verdict.mistakes.append(f"{', '.join(finding.gradients)} fits only some of the shapes")
                verdict.explained.append(leading_axes(part))
            elif name not in verdict.mistakes:  # one cause is said once
                verdict.mistakes.append(name)
                said = (own_words(finding.explains, part.function), factor_words(finding.name))
                verdict.explained.append(" ".join(filter(None, said)))
        merge_places(verdict)
        if report.chain is not None:
            verdict.chain = own_words(str(report.chain), part.function)
        if not verdict.mistakes and any(kind == "nan" for kind in found):
            verdict.mistakes.append("a value that is not finite")
            verdict.explained.append(NOT_FINITE)
    elif report.not_given:
        verdict.status = "partial"
    refuse_inexact(verdict, report)
    if swapped:
        verdict.status = "wrong"
        verdict.mistakes.insert(0, "the gradients are returned in another order")
        verdict.explained.insert(0, f"Return {', '.join(report.layer.gradients)}, in this order.")
    return verdict


def refuse_inexact(verdict: PartVerdict, report: LayerReport) -> None:
    """Marks as wrong what is as accurate as float32 only, which the checker accepts: the course gives float64."""
    coarse = {name for o in report.outcomes if report.counts(o) for name in o.single_precision}
    names = [name for name in verdict.marks if name in coarse]
    if names:
        verdict.status = "wrong"
        verdict.marks |= dict.fromkeys(names, "wrong")
        verdict.mistakes.append(INEXACT.format(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"))
        verdict.explained.append(INEXACT_WHY)


def merge_places(verdict: PartVerdict) -> None:
    """Several mistakes at one place, such as “(the output projection)”, become one: the first, which says so."""
    places: dict[str, int] = {}
    merged: list[tuple[str, str]] = []
    for name, explained in zip(verdict.mistakes, verdict.explained, strict=True):
        found = re.search(r" \(([^()]+)\)$", name)
        place = found[1] if found else ""
        if place and place in places:
            first, why = merged[places[place]]
            said = f"The other gradients of this layer are wrong as well: look for one wrong variable at {place}."
            merged[places[place]] = first, why if said in why else f"{why} {said}".strip()
            continue
        if place:
            places[place] = len(merged)
        merged.append((name, explained))
    verdict.mistakes, verdict.explained = [one[0] for one in merged], [one[1] for one in merged]


def other_order(report: LayerReport) -> list[str]:
    """The gradients that are not in their place in what was returned. The checker recognises them by their shapes."""
    found = re.search(r"returned in the order ([\w, ]+)", report.recognised)
    if found is None:
        return []
    return [name for name, place in zip(report.layer.gradients, found[1].split(", "), strict=False) if name != place]


def unwritten(report: LayerReport) -> list[str]:
    """The gradients that are None, where the function also raises in other cases."""
    messages = [p.message for o in report.failed for p in o.problems if p.kind == "count"]
    found = [re.fullmatch(r"it does not return ([\w, ]+)", one) for one in messages]
    return next((one[1].split(", ") for one in found if one is not None), [])


def described(kind: str, message: str) -> str:
    if kind != "raises" or message.startswith(WRONG_RETURN):
        return message.removeprefix(WRONG_RETURN)
    return f"it raises {message}"


def mark(report: LayerReport, name: str) -> str:
    """Whether a gradient is right, wrong, None, or could not be judged."""
    if name in report.not_given:
        return "None"
    outcomes = [o for o in report.outcomes if report.counts(o)]
    measured = [m for o in outcomes for m in o.measured if m.gradient == name]
    if name in report.wrong:
        return "wrong"
    wrong_shape = any(p.kind == "shape" and p.message.startswith(f"{name} ") for o in outcomes for p in o.problems)
    wrong_return = any(p.message.startswith(WRONG_RETURN) for o in outcomes for p in o.problems)
    if wrong_shape or wrong_return:
        return "wrong"
    judged = [o for o in outcomes if not any(p.kind in ("raises", "crash", "timeout", "exit") for p in o.problems)]
    return "right" if measured and judged else "not judged"
