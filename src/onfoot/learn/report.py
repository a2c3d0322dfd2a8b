"""The verdict that a report of the checker means, in the words of the exercise."""

from __future__ import annotations

import re

from onfoot.check.report import LayerReport
from onfoot.learn.adapters import OUR_LINE, WrongReturnError
from onfoot.learn.course import Part
from onfoot.learn.form import leading_axes
from onfoot.learn.verdict import PartVerdict
from onfoot.learn.words import factor_words, own_words

NOT_FINITE = (
    "Look for 0/0, ∞ − ∞ or 0 · ∞. What is masked or left out has the gradient 0: it must not become ∞, "
    "even where the forward pass has −∞."
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
WRONG_RETURN = f"{WrongReturnError.__name__}: "  # of an adapter: not raised by the learner's function


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
    problems = [  # the first of each kind: later cases differ only in their sizes
        OUR_LINE.sub("", said) if kind == "raises" else own_words(OUR_LINE.sub("", said), part.function)
        for kind, said in reversed(found.items())
    ]
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
