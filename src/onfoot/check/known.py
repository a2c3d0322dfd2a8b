"""Checks a user's backward pass of a known layer against the exact gradients, for every case and dtype."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.budget import UNIT, allowed, distance, layer_magnitudes, norm
from onfoot.check.call import ARRAYS, Answer, Problem, accepted_options, accepts_arguments, call, has_torch
from onfoot.check.candidate import Evidence
from onfoot.check.case_sizes import ANY, Sizes, all_cases, first_case, sizes_for
from onfoot.check.diagnose import Diagnosis, diagnose
from onfoot.check.layer import Array, Case, Gradients, Layer
from onfoot.check.locate import pattern
from onfoot.check.numeric_example import Example, smallest_difference, two_tokens, worst_entry
from onfoot.check.report import LayerReport, Measured, Outcome
from onfoot.threads import one_blas_thread

DTYPES = ("float64", "float32")
DEATHS_ALLOWED = 3  # a function whose process died in so many cases is not called again
SLOW = 1.0  # seconds; a large case that takes longer is run in the first dtype only
FLOAT32_FACTOR = UNIT["float32"] / UNIT["float64"]


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
    """Runs all cases, compares every gradient, and looks for known mistakes if any is wrong."""
    if not callable(backward):
        raise ValueError(f"backward must be a function {layer.signature}, got {backward!r}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    dtypes = checked_dtypes(dtypes)
    sizes, options = sizes_for(layer, options, getattr(backward, "sizes", None))
    with np.errstate(all="ignore"), one_blas_thread():
        checker = _LayerChecker(layer, backward, layer.with_options(options), sizes)
        cases = checker.cases(seed)
        checker.arrays = checker.choose_arrays(arrays, seed)
        outcomes = checker.outcomes(cases, dtypes)
        report = LayerReport(
            checker.layer, name or _name(backward), dict(checker.options), checker.arrays, seed, strict, outcomes
        )
        report.not_given = [one for one in layer.gradients if one not in checker.layer.gradients]
        _diagnose(report, checker.magnitudes)
        _relax(report)
        _forgive_in_place(report)
        if not report.passed:
            report.example = checker.example(report)
    _warn(report)
    report.warnings += checker.warnings
    return report


class _LayerChecker:
    """Calls the function on the cases and compares the results with the exact gradients."""

    def __init__(
        self, layer: Layer, backward: Callable[..., Any], options: Mapping[str, Any], sizes: Sizes = ANY
    ) -> None:
        self.layer, self.backward, self.options, self.sizes = layer, backward, options, sizes
        self.dead: dict[str, Answer] = {}  # case -> the answer that ended the function's process
        self.warnings: list[str] = []
        self.keyword_options = accepted_options(backward, options)
        self.arrays = "numpy"
        self.magnitudes: dict[str, list[float]] = {}
        n = len(layer.arguments)
        self.without_upstream = (
            layer.upstream_optional and not accepts_arguments(backward, n) and accepts_arguments(backward, n - 1)
        )

    def cases(self, seed: int) -> list[Case]:
        found = all_cases(self.layer, seed, self.options, self.sizes)
        return self._without_upstream(found)

    def _without_upstream(self, found: list[Case]) -> list[Case]:
        if self.without_upstream:
            found = [replace(case, inputs=(*case.inputs[:-1], 1.0)) for case in found]
        return found

    def call(self, case: Case, right: Gradients) -> Answer:
        expected = [(name, g.shape) for name, g in zip(self.layer.gradients, right, strict=True)]
        inputs = case.inputs[:-1] if self.without_upstream else case.inputs
        if case.name in self.dead:
            return self.dead[case.name]
        answer = call(self.backward, inputs, self.layer.arguments, expected, self.keyword_options, self.arrays)
        if answer.died:
            answer.problems = [replace(p, message=f"{p.message}; {self._called_with(inputs)}") for p in answer.problems]
            self.dead[case.name] = answer
        return answer

    def _called_with(self, inputs: Sequence[Any]) -> str:
        shapes = (f"{name} {x.shape}" for name, x in zip(self.layer.arguments, inputs, strict=False) if _is_array(x))
        return f"called with {', '.join(shapes)}"

    @property
    def stopped(self) -> bool:
        """Whether the function has hung, or has died so often that it is not called again."""
        hung = any(p.kind == "timeout" for answer in self.dead.values() for p in answer.problems)
        return hung or len(self.dead) >= DEATHS_ALLOWED

    def outcomes(self, cases: Sequence[Case], dtypes: Sequence[str]) -> list[Outcome]:
        """The outcomes of all cases; stops where the function has hung or keeps dying."""
        found: list[Outcome] = []
        left: dict[str, None] = {}
        slow: dict[str, float] = {}
        for dtype in dtypes:
            for case in cases:
                if self.stopped and case.name not in self.dead:
                    left[case.name] = None
                elif dtype != dtypes[0] and (case.name in slow or case.name in self.dead):
                    continue
                else:
                    start = time.perf_counter()
                    found.append(self.outcome(case, dtype))
                    if case.large and time.perf_counter() - start > SLOW:
                        slow[case.name] = time.perf_counter() - start
        if left:
            self.warnings.append(f"not run, because the function hung or died before: {_quoted(left)}")
        if slow and len(dtypes) > 1:
            seconds = max(slow.values())
            self.warnings.append(f"run in {dtypes[0]} only, because it took {seconds:.1f} seconds: {_quoted(slow)}")
        return found

    def choose_arrays(self, arrays: str, seed: int) -> str:
        """Returns the kind of arrays to pass; auto means NumPy, or PyTorch if the function raises on NumPy arrays.

        A function that returns only some of the gradients is then judged on those.
        """
        if arrays not in ARRAYS:
            raise ValueError(f"arrays must be one of {', '.join(ARRAYS)}, got {arrays!r}")
        if arrays == "torch" and not has_torch():
            raise ValueError('arrays="torch" needs PyTorch: pip install "onfoot[torch]"')
        (case,) = self._without_upstream([first_case(self.layer, seed + 1, self.options, self.sizes)])
        right = self.layer.reference(*case.inputs, **self.options)
        for self.arrays in ("numpy", "torch") if arrays == "auto" else (arrays,):
            if self.arrays == "torch" and not has_torch():
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the wrong kind of arrays may cause warnings
                answer = self.call(case, right)
            if not any(p.kind == "raises" for p in answer.problems):
                if answer.given and len(answer.given) < len(self.layer.gradients):
                    self.layer = self.layer.only(answer.given)
                return self.arrays
        return "numpy" if arrays == "auto" else arrays

    def outcome(self, case: Case, dtype: str) -> Outcome:
        given = _rounded(case, dtype)
        exact = _rounded(given, "float64")
        right = self.layer.reference(*exact.inputs, **self.options)
        if case.name not in self.magnitudes:  # does not depend on the dtype
            self.magnitudes[case.name] = layer_magnitudes(self.layer, exact, self.options)
        budgets = [allowed(m, dtype) for m in self.magnitudes[case.name]]
        answer = self.call(given, right)
        again = answer if case.large or answer.gradients is None else self.call(given, right)
        out = Outcome(exact, dtype, answer, problems=list(answer.problems))
        if answer.gradients is None:
            return out
        for name, got, r, budget in zip(self.layer.gradients, answer.gradients, right, budgets, strict=True):
            if got.shape == r.shape:
                out.measured.append(measure(name, got, r, budget))
        out.problems += _differences(self.layer.gradients, answer.gradients, again, budgets)
        return out

    def example(self, report: LayerReport) -> Example | None:
        """A small numeric example of a wrong gradient: two tokens if those are wrong, else the worst entry."""
        if not report.wrong or self.stopped:
            return None
        for case in self._without_upstream(two_tokens(self.layer, self.options, self.sizes)):
            right = self.layer.reference(*case.inputs, **self.options)
            answer = self.call(case, right)
            found = smallest_difference(self.layer, case, answer, right, report.wrong)
            if found is not None:
                return found
        return worst_entry(report, self.options)


def measure(name: str, got: Array, right: Array, budget: float) -> Measured:
    """The error of one gradient, relative to its norm, or absolute if the correct gradient is rounding noise."""
    size = norm(right)
    absolute = size <= budget
    scale = 1.0 if absolute else size
    if not np.isfinite(got).all():
        return Measured(name, float("nan"), budget / scale, absolute, pattern(~np.isfinite(got)))
    error = distance(got, right)
    where = pattern(np.abs(got - right) > budget / np.sqrt(got.size)) if error > budget else ""
    return Measured(name, error / scale, budget / scale, absolute, where)


def _like_float32(report: LayerReport) -> bool:
    """Whether the float64 results are only as accurate as float32, in every case."""
    exact = [o for o in report.outcomes if o.dtype == "float64" and report.counts(o)]
    measured = [m for o in exact for m in o.measured]
    problems = [p for o in exact for p in o.problems if p.kind != "mutates"]
    if any(p.size > FLOAT32_FACTOR for p in problems) or all(m.ok for m in measured):
        return False
    return all(m.error <= FLOAT32_FACTOR * m.allowed for m in measured)


def _relax(report: LayerReport) -> None:
    """Applies the float32 tolerance to results that are that accurate and fit no known mistake."""
    if _like_float32(report) and not (report.diagnosis and report.diagnosis.findings):
        for o in report.outcomes:
            if o.dtype == "float64":
                o.single_precision = True
                o.measured = [replace(m, allowed=FLOAT32_FACTOR * m.allowed) for m in o.measured]
                o.problems = [p for p in o.problems if p.size > FLOAT32_FACTOR]
        report.diagnosis = None


def _differences(
    names: Sequence[str], first: Sequence[Array], again: Answer, budgets: Sequence[float]
) -> list[Problem]:
    """Two calls with the same inputs must agree up to rounding; parallel sums may differ in the last bits."""
    if again.gradients is None or any(a.shape != b.shape for a, b in zip(first, again.gradients, strict=True)):
        return [Problem("random", "a second call with the same inputs fails or returns other shapes")]
    found = []
    for name, a, b, budget in zip(names, first, again.gradients, budgets, strict=True):
        gap = distance(a, b)
        if gap > budget:
            message = f"{name}: a second call with the same inputs differs by {gap / max(norm(a), norm(b)):.1e}"
            found.append(Problem("random", message, gap / budget if budget else math.inf))
    return found


def _rounded(case: Case, dtype: str) -> Case:
    """The case with its floating-point arrays cast to `dtype`."""
    inputs = (x.astype(dtype) if _is_array(x) and x.dtype.kind == "f" else x for x in case.inputs)
    return replace(case, inputs=tuple(inputs))


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"“{name}”" for name in names)


def _diagnose(report: LayerReport, magnitudes: Mapping[str, list[float]]) -> None:
    """Looks for known mistakes, in the most accurate requested dtype."""
    dtype = report.outcomes[0].dtype
    outcomes = [o for o in report.outcomes if o.dtype == dtype and o.answer.gradients is not None]
    counted = [o for o in outcomes if report.counts(o)]
    small, large = ([o for o in counted if o.case.large == size] for size in (False, True))
    only_large = not any(map(_is_wrong, small)) and any(map(_is_wrong, large))
    if report.failed and not any(map(_is_wrong, counted)):
        return  # it raises or dies; what it does beyond the contract is not the cause
    seen = large if only_large else small if any(map(_is_wrong, small)) else [o for o in outcomes if not o.case.large]
    report.diagnosis = _diagnosis(report, seen, magnitudes)
    finite = [o for o in seen if all(np.isfinite(g).all() for g in o.answer.gradients or [])]
    if report.diagnosis is None or report.diagnosis.complete or not 0 < len(finite) < len(seen):
        return
    without = _diagnosis(report, finite, magnitudes)  # nan in one case must not silence the others
    if without is not None and len(without.unexplained) < len(report.diagnosis.unexplained):
        report.diagnosis = without
        left_out = _quoted(o.case.name for o in seen if o not in finite)
        report.warnings.append(f"the diagnosis leaves out the cases with nan or infinite entries: {left_out}")


def _diagnosis(
    report: LayerReport, outcomes: Sequence[Outcome], magnitudes: Mapping[str, list[float]]
) -> Diagnosis | None:
    """The diagnosis of these cases; None if nothing is wrong in them."""
    right = [{m.gradient for m in o.measured if m.ok} for o in outcomes]
    wrong = [g for g, name in enumerate(report.layer.gradients) if any(name not in one for one in right)]
    if not wrong:
        return None
    answers = [o.answer.gradients or [] for o in outcomes]
    cases, sizes = [o.case for o in outcomes], [magnitudes[o.case.name] for o in outcomes]
    evidence = Evidence(report.layer, report.options, cases, answers, sizes, outcomes[0].dtype)
    only_large = all(o.case.large for o in outcomes)
    return diagnose(evidence, wrong, pairs=not (only_large or _like_float32(report)))


def _is_wrong(outcome: Outcome) -> bool:
    return len([m for m in outcome.measured if m.ok]) < len(outcome.answer.gradients or [])


def _forgive_in_place(report: LayerReport) -> None:
    """Arguments modified in place are a warning, if the results are right."""
    if any(not m.ok for o in report.failed for m in o.measured):
        return
    messages: dict[str, None] = {}
    for o in report.outcomes:
        messages |= dict.fromkeys(p.message for p in o.problems if p.kind == "mutates")
        o.problems = [p for p in o.problems if p.kind != "mutates"]
    report.warnings += [f"{message}: whoever uses it afterwards gets other values" for message in messages]


def _warn(report: LayerReport) -> None:
    """Adds warnings that do not make the check fail."""
    if any(o.single_precision for o in report.outcomes):
        report.warnings.append(
            "float64 is only as accurate as float32 and was judged as such: a step computes in float32 or loses digits"
        )
    lost = [o for o in report.outcomes if report.counts(o) and not o.ok]
    if report.passed and lost:
        cases = ", ".join(f"“{o.case.name}”" for o in lost)
        report.warnings.append(f"correct in float64, but the float32 error is larger than rounding explains: {cases}")


def checked_dtypes(dtypes: Sequence[str]) -> list[str]:
    """Returns the dtypes, the most accurate first; raises a ValueError if one is unknown."""
    dtypes = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    if not dtypes:
        raise ValueError(f"dtypes is empty; choose from {', '.join(DTYPES)}")
    return sorted(set(dtypes), key=DTYPES.index)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
