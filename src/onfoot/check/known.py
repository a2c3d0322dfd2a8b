"""Checking a user's backward pass of a known layer against the exact gradients, case by case and dtype by dtype."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.budget import UNIT, allowed, distance, layer_magnitudes, norm
from onfoot.check.call import ARRAYS, Answer, Problem, accepted_options, call, has_torch, takes
from onfoot.check.candidate import Evidence
from onfoot.check.diagnose import diagnose
from onfoot.check.layer import Array, Case, Gradients, Layer
from onfoot.check.locate import pattern
from onfoot.check.report import LayerReport, Measured, Outcome

DTYPES = ("float64", "float32")
SINGLE = UNIT["float32"] / UNIT["float64"]


def check_layer(
    layer: Layer,
    backward: Callable[..., Any],
    *,
    dtypes: Sequence[str] = DTYPES,
    arrays: str = "auto",
    seed: int = 0,
    strict: bool = False,
    name: str | None = None,
    **options: Any,
) -> LayerReport:
    """Runs the battery of cases, judges every gradient, and looks for known mistakes where some are wrong."""
    if not callable(backward):
        raise ValueError(f"{backward!r} cannot be called; a function {layer.signature} is needed")
    if seed < 0:
        raise ValueError(f"seed={seed}: a number from 0 on is needed")
    dtypes = checked_dtypes(dtypes)
    with np.errstate(all="ignore"):
        ask = _LayerChecker(layer, backward, layer.with_options(options))
        cases = ask.cases(seed)
        ask.arrays = ask.choose(arrays, cases[0])
        outcomes = [ask.outcome(case, dtype) for dtype in dtypes for case in cases]
        report = LayerReport(layer, name or _name(backward), dict(ask.options), ask.arrays, seed, strict, outcomes)
        _diagnose(report, ask.magnitudes)
        _relax(report)
    _warn(report)
    return report


class _LayerChecker:
    """Puts the cases to the function, and judges what comes back."""

    def __init__(self, layer: Layer, backward: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.layer, self.backward, self.options = layer, backward, options
        self.passed_on = accepted_options(backward, options)
        self.arrays = "numpy"
        self.magnitudes: dict[str, list[float]] = {}
        n = len(layer.arguments)
        self.without_upstream = layer.upstream_optional and not takes(backward, n) and takes(backward, n - 1)

    def cases(self, seed: int) -> list[Case]:
        found = self.layer.cases(np.random.default_rng(seed), **self.options)
        if self.without_upstream:
            found = [replace(case, inputs=(*case.inputs[:-1], 1.0)) for case in found]
        return found

    def call(self, case: Case, right: Gradients) -> Answer:
        expected = [(name, g.shape) for name, g in zip(self.layer.gradients, right, strict=True)]
        inputs = case.inputs[:-1] if self.without_upstream else case.inputs
        return call(self.backward, inputs, self.layer.arguments, expected, self.passed_on, self.arrays)

    def choose(self, arrays: str, case: Case) -> str:
        """The kind of arrays that the function wants: NumPy's, and PyTorch's only where it raises with those."""
        if arrays not in ARRAYS:
            raise ValueError(f"arrays={arrays!r}: one of {', '.join(ARRAYS)} is needed")
        if arrays == "torch" and not has_torch():
            raise ValueError('arrays="torch" needs PyTorch: pip install "onfoot[torch]"')
        if arrays != "auto":
            return arrays
        right = self.layer.reference(*case.inputs, **self.options)
        for self.arrays in ("numpy", "torch"):
            if self.arrays == "torch" and not has_torch():
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a function says that is given the wrong kind
                answer = self.call(case, right)
            if not any(p.kind == "raises" for p in answer.problems):
                return self.arrays
        return "numpy"

    def outcome(self, case: Case, dtype: str) -> Outcome:
        given = _rounded(case, dtype)
        exact = _rounded(given, "float64")
        right = self.layer.reference(*exact.inputs, **self.options)
        if case.name not in self.magnitudes:  # the same for all dtypes
            self.magnitudes[case.name] = layer_magnitudes(self.layer, exact, self.options)
        budgets = [allowed(m, dtype) for m in self.magnitudes[case.name]]
        answer, again = self.call(given, right), self.call(given, right)
        out = Outcome(exact, dtype, answer, problems=list(answer.problems))
        if answer.gradients is None:
            return out
        for name, got, r, budget in zip(self.layer.gradients, answer.gradients, right, budgets, strict=True):
            if got.shape == r.shape:
                out.measured.append(measure(name, got, r, budget))
        out.problems += _differences(self.layer.gradients, answer.gradients, again, budgets)
        return out


def measure(name: str, got: Array, right: Array, budget: float) -> Measured:
    """The error of one gradient. Where the right one is no more than noise, errors are absolute."""
    size = norm(right)
    absolute = size <= budget
    scale = 1.0 if absolute else size
    if not np.isfinite(got).all():
        return Measured(name, float("nan"), budget / scale, absolute, pattern(~np.isfinite(got)))
    error = distance(got, right)
    where = pattern(np.abs(got - right) > budget / np.sqrt(got.size)) if error > budget else ""
    return Measured(name, error / scale, budget / scale, absolute, where)


def _like_float32(report: LayerReport) -> bool:
    """Whether float64 is answered with the precision of float32, in every case."""
    exact = [o for o in report.outcomes if o.dtype == "float64" and report.counts(o)]
    measured = [m for o in exact for m in o.measured]
    if any(p.size > SINGLE for o in exact for p in o.problems) or all(m.ok for m in measured):
        return False
    return all(m.error <= SINGLE * m.allowed for m in measured)


def _relax(report: LayerReport) -> None:
    """Judges as float32 what is as exact as that and fits no known mistake."""
    if _like_float32(report) and not (report.diagnosis and report.diagnosis.findings):
        for o in report.outcomes:
            if o.dtype == "float64":
                o.single_precision = True
                o.measured = [replace(m, allowed=SINGLE * m.allowed) for m in o.measured]
                o.problems = [p for p in o.problems if p.size > SINGLE]
        report.diagnosis = None


def _differences(
    names: Sequence[str], first: Sequence[Array], again: Answer, budgets: Sequence[float]
) -> list[Problem]:
    """Two calls with the same inputs must agree; in the last bits they may differ, as parallel sums do."""
    if again.gradients is None or any(a.shape != b.shape for a, b in zip(first, again.gradients, strict=True)):
        return [Problem("random", "a second call with the same inputs does something else")]
    found = []
    for name, a, b, budget in zip(names, first, again.gradients, budgets, strict=True):
        gap = distance(a, b)
        if gap > budget:
            said = f"{name}: a second call with the same inputs differs by {gap / max(norm(a), norm(b)):.1e}"
            found.append(Problem("random", said, gap / budget if budget else math.inf))
    return found


def _rounded(case: Case, dtype: str) -> Case:
    """The case with its floating-point arrays in a dtype."""
    inputs = (x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x for x in case.inputs)
    return replace(case, inputs=tuple(inputs))


def _diagnose(report: LayerReport, magnitudes: Mapping[str, list[float]]) -> None:
    """Looks for known mistakes, in the most exact dtype that was asked for."""
    dtype = report.outcomes[0].dtype
    outcomes = [o for o in report.outcomes if o.dtype == dtype and o.answer.gradients is not None]
    counted = [o for o in outcomes if report.counts(o)]
    seen = counted if any(_is_wrong(o) for o in counted) else outcomes
    right = [{m.gradient for m in o.measured if m.ok} for o in seen]
    wrong = [g for g, name in enumerate(report.layer.gradients) if any(name not in names for names in right)]
    if wrong:
        answers = [o.answer.gradients or [] for o in seen]
        cases, sizes = [o.case for o in seen], [magnitudes[o.case.name] for o in seen]
        evidence = Evidence(report.layer, report.options, cases, answers, sizes, seen[0].dtype)
        report.diagnosis = diagnose(evidence, wrong, pairs=not _like_float32(report))


def _is_wrong(outcome: Outcome) -> bool:
    return len([m for m in outcome.measured if m.ok]) < len(outcome.answer.gradients or [])


def _warn(report: LayerReport) -> None:
    """What is worth a word without being a mistake."""
    if any(o.single_precision for o in report.outcomes):
        report.warnings.append(
            "in float64 only as exact as float32, and judged so: something inside computes in float32, or loses digits"
        )
    lost = [o for o in report.outcomes if report.counts(o) and not o.ok]
    if report.passed and lost:
        cases = ", ".join(f"“{o.case.name}”" for o in lost)
        report.warnings.append(f"right in float64, but in float32 worse than rounding explains: {cases}")


def checked_dtypes(dtypes: Sequence[str]) -> list[str]:
    """The dtypes, the most exact first; a ValueError where one is unknown."""
    dtypes = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not dtypes:
        raise ValueError(f"no dtype; give some of {', '.join(DTYPES)}")
    return sorted(set(dtypes), key=DTYPES.index)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
