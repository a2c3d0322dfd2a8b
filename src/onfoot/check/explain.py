"""Explains the outcomes of a check: the known mistakes in what is wrong, and what is a warning instead of a mistake."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from onfoot.check.budget import DTYPES, UNIT
from onfoot.check.candidate import Evidence
from onfoot.check.diagnose import Diagnosis, Finding, diagnose
from onfoot.check.equations import equation_of
from onfoot.check.layer import Case
from onfoot.check.report import LayerReport, Outcome
from onfoot.check.single import FACTOR, coarse, computes_in_float32, has_float32_numbers, is_as_accurate, relax

MIN_FINITE = 2  # cases; fewer say too little if the others have nan
LOW_ACCURACY = "a step computes in float32 or loses digits, or a constant is written with few digits"
DIGITS = 1e-9  # a constant that is closer to the right one is the right one, written with 9 digits or more


class Checker(Protocol):
    """Calls the function on cases and measures its errors; see `known.py`."""

    warnings: list[str]
    magnitudes: dict[str, list[float]]  # case -> of each gradient

    def outcomes(self, cases: Sequence[Case], dtypes: Sequence[str]) -> list[Outcome]: ...


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"“{name}”" for name in names)


def explain(report: LayerReport, magnitudes: Mapping[str, list[float]], every: bool = False) -> None:
    """Looks for known mistakes, in the most accurate requested dtype; by `every` means also if that is float32's."""
    dtype = report.outcomes[0].dtype
    outcomes = [o for o in report.outcomes if o.dtype == dtype and o.answer.gradients is not None]
    counted = [o for o in outcomes if report.counts(o)]
    small, large = ([o for o in counted if o.case.large == size] for size in (False, True))
    only_large = not any(map(_is_wrong, small)) and any(map(_is_wrong, large))
    if report.failed and not any(map(_is_wrong, counted)):
        report.diagnosis = _calls_that_differ(report) or _integer_arrays(report)
        return  # it raises or dies; what it does beyond the contract is not the cause
    seen = large if only_large else small if any(map(_is_wrong, small)) else [o for o in outcomes if not o.case.large]
    finite = [o for o in seen if all(np.isfinite(g).all() for g in o.answer.gradients or [])]
    some = MIN_FINITE <= len(finite) < len(seen)
    report.diagnosis = _calls_that_differ(report)
    if report.diagnosis is not None:
        return
    brief = (computes_in_float32(report) and not every) or not report.failed
    report.diagnosis = _diagnosis_of(report, seen, magnitudes, brief=some or brief)
    if report.diagnosis is None or report.diagnosis.complete or not some or not report.failed:
        return
    without = _diagnosis_of(report, finite, magnitudes, brief)  # nan in one case must not silence the others
    if without is None or len(without.unexplained) >= len(report.diagnosis.unexplained):
        report.diagnosis = _diagnosis_of(report, seen, magnitudes, brief)
    else:
        report.diagnosis = without
        left_out = quoted(o.case.name for o in seen if o not in finite)
        report.warnings.append(f"the diagnosis leaves out the cases with nan or infinite entries: {left_out}")


def _integer_arrays(report: LayerReport) -> Diagnosis | None:
    """The diagnosis of gradients that are integer arrays; None if there are none."""
    messages = dict.fromkeys(p.message for o in report.failed for p in o.problems if p.kind == "type")
    names = [g for g in report.layer.gradients if any(m.startswith(f"{g} is an array of int") for m in messages)]
    if not names:
        return None
    name = f"{', '.join(names)}: an integer array, which cuts off the fractions"
    explains = "The gradient is gathered in an array whose dtype is that of the ids or of a list of integers."
    fix = "gather it in floating point: np.zeros_like(weight), or zeros of dout's dtype"
    return Diagnosis([Finding(name, explains, "", fix, "", names)], residual=0.0, cases=len(report.failed))


def _calls_that_differ(report: LayerReport) -> Diagnosis | None:
    """The diagnosis of gradients that depend on earlier calls, or on chance; None if there are none."""
    problems = [p for o in report.outcomes if o.dtype == report.outcomes[0].dtype for p in o.problems]
    problems = [p for p in problems if p.kind == "random" and p.gradient]
    names = [g for g in report.layer.gradients if any(p.gradient == g for p in problems)]
    if not names or not set(report.wrong) <= set(names):
        return None  # another mistake as well
    added = all(p.added for p in problems)
    if not added and coarse(report) and all(p.size <= FACTOR for p in problems):
        return None  # parallel sums in float32
    if added:
        name = "the gradients of earlier calls are added: a second call returns the first result plus its own"
        fix = "start every call from zeros, or zero the buffers before it"
    else:
        name = "two calls with the same inputs differ: something is kept from the call before, random or never set"
        fix = "keep nothing between calls: no buffer, cache or changed default argument; no random numbers, no np.empty"
    finding = Finding(f"{', '.join(names)}: {name}", "", "", fix, "", names)
    return Diagnosis([finding], residual=0.0, cases=len(report.failed))


def diagnose_in_float64(report: LayerReport, checker: Checker, cases: Sequence[Case]) -> None:
    """Looks for known mistakes in float64, or float32 if it raises in that: 16 bits leave too many that fit."""
    if report.passed:
        return
    before, checker.warnings = checker.warnings, []
    for dtype in DTYPES:
        exact = replace(report, outcomes=checker.outcomes(cases, [dtype]))
        if not any(o.answer.gradients is None for o in exact.outcomes):
            explain(exact, checker.magnitudes)
            diagnose_in_float32(exact, checker, cases)
            report.diagnosis = exact.diagnosis
            if exact.passed and report.wrong:
                before.append(
                    f"right in {dtype}: in {report.outcomes[0].dtype} it loses more digits than rounding explains"
                )
            break
    checker.warnings = before


def forgive_last_digits(report: LayerReport) -> None:
    """A constant that is right to 9 digits, such as √(2/π) = 0.7978845608, is a note if nothing else is wrong."""
    found = report.diagnosis
    if found is None or not found.complete or not all(0 < f.off <= DIGITS for f in found.findings):
        return
    factor = max(f.off for f in found.findings) / UNIT["float64"]  # what so large an error explains
    wrong = [o for o in report.failed if o.dtype == "float64"]
    if any(o.problems for o in wrong) or not all(m.error <= factor * m.allowed for o in wrong for m in o.measured):
        return
    for o in wrong:
        o.measured = [replace(m, allowed=factor * m.allowed) for m in o.measured]
    if report.passed:
        report.diagnosis = None
        for f in found.findings:
            report.warnings.append(f"{f.name}, {f.value}: right to {int(-math.log10(f.off))} digits")


def diagnose_in_float32(report: LayerReport, checker: Checker, cases: Sequence[Case]) -> None:
    """Judges and diagnoses a function that computes in float32 in that precision, if float64 does not name it all."""
    found = report.diagnosis
    if (found and found.complete) or not report.wrong or not computes_in_float32(report):
        return
    names = coarse(report)
    if found is not None:
        found.unexplained = [name for name in found.unexplained if name not in names]
    if is_as_accurate(report) and not (found and found.findings):
        report.diagnosis = found = None
    relax(report)
    if not report.wrong or (found and found.complete):
        return
    before, checker.warnings = checker.warnings, []
    outcomes = [o for o in report.outcomes if o.dtype == "float32"] or checker.outcomes(cases, ["float32"])
    checker.warnings = before
    single = replace(report, outcomes=outcomes)
    explain(single, checker.magnitudes)
    left = len(found.unexplained) if found and found.findings else math.inf
    if single.diagnosis is None or not single.diagnosis.findings:
        explain(report, checker.magnitudes, every=True)  # it was brief: most such functions are named in float32
    elif len(single.diagnosis.unexplained) < left:
        report.diagnosis = single.diagnosis
        report.warnings.append("named in float32: the gradients of float64 inputs have the digits of float32")


def _diagnosis_of(
    report: LayerReport, outcomes: Sequence[Outcome], magnitudes: Mapping[str, list[float]], brief: bool = False
) -> Diagnosis | None:
    """The diagnosis of these cases, without probes and pairs if `brief`; None if nothing is wrong in them."""
    right = [{m.gradient for m in o.measured if m.ok} for o in outcomes]
    wrong = [g for g, name in enumerate(report.layer.gradients) if any(name not in one for one in right)]
    if not wrong:
        return None
    answers = [o.answer.gradients or [] for o in outcomes]
    cases, sizes = [o.case for o in outcomes], [magnitudes[o.case.name] for o in outcomes]
    evidence = Evidence(report.layer, report.options, cases, answers, sizes, outcomes[0].dtype)
    only_large = all(o.case.large for o in outcomes)
    pairs = report.layer.probed and not (only_large or brief)
    return diagnose(evidence, wrong, pairs=pairs)


def _is_wrong(outcome: Outcome) -> bool:
    return len([m for m in outcome.measured if m.ok]) < len(outcome.answer.gradients or [])


def forgive_changed_arguments(report: LayerReport) -> None:
    """Arguments modified in place are a warning, if the results are right."""
    if any(not m.ok for o in report.failed for m in o.measured):
        return
    messages: dict[str, None] = {}
    for o in report.outcomes:
        messages |= dict.fromkeys(p.message for p in o.problems if p.kind == "mutates")
        o.problems = [p for p in o.problems if p.kind != "mutates"]
    told = [m for m in messages if not any(other.startswith(f"{m} (") for other in messages)]  # with the line, once
    report.warnings += [f"{message}: whoever uses it afterwards gets other values" for message in told]


def add_equations(report: LayerReport) -> None:
    """Gives a finding that violates no equation in particular that of its first gradient."""
    for i, finding in enumerate(report.diagnosis.findings if report.diagnosis else ()):
        if not finding.equation and finding.gradients and report.diagnosis is not None:
            equation = equation_of(report.layer.name, finding.gradients[0], report.options.get("form", ""))
            report.diagnosis.findings[i] = replace(finding, equation=equation)


def warn_of_lost_digits(report: LayerReport) -> None:
    """Adds warnings that do not make the check fail."""
    judged = list(dict.fromkeys(name for o in report.outcomes for name in o.single_precision))
    if judged:
        which = "float64 is" if not report.wrong else f"float64 of {', '.join(judged)} is"
        report.warnings.append(
            f"{which} only as accurate as float32 and was judged as such: "
            + ("a step computes in float32" if has_float32_numbers(report) else LOW_ACCURACY)
        )
    lost = [o for o in report.outcomes if report.counts(o) and not o.ok]
    for dtype in dict.fromkeys(o.dtype for o in lost) if report.passed else ():
        cases = quoted(o.case.name for o in lost if o.dtype == dtype)
        report.warnings.append(f"correct in float64, but the {dtype} error is larger than rounding explains: {cases}")
