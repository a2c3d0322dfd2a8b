"""Checks a user's backward pass of a known layer against the exact gradients, for every case and dtype."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.budget import DTYPES, allowed, distance, layer_magnitudes, norm
from onfoot.check.call import Answer, Problem
from onfoot.check.case_sizes import ANY, Sizes, all_cases, first_case, read_sizes, sizes_for
from onfoot.check.chain import Chain, find_break, is_composite, small_case
from onfoot.check.explain import (
    add_equations,
    diagnose_in_float32,
    diagnose_in_float64,
    explain,
    forgive_changed_arguments,
    forgive_last_digits,
    quoted,
    warn_of_lost_digits,
)
from onfoot.check.forms import Expected, Form, forms_of
from onfoot.check.hints import hints
from onfoot.check.isolated import IsolatedFunction, RemoteForm
from onfoot.check.layer import Array, Case, Gradients, Layer
from onfoot.check.layouts import refuse_huge
from onfoot.check.locate import pattern
from onfoot.check.mistakes import mistakes_of, replaced_pieces
from onfoot.check.narrow import NARROW, narrow_budgets
from onfoot.check.numeric_example import Example, smallest_difference, two_tokens, worst_entry
from onfoot.check.plan import Chooser, Plan, Trial, kinds_of, rounded_case, without
from onfoot.check.report import LayerReport, Measured, Outcome
from onfoot.threads import one_blas_thread

ALL_DTYPES = (*DTYPES, *NARROW)  # the most accurate first
TRIAL = "the first call"  # in which it is found out how the function is called
DEATHS_ALLOWED = 3  # a function whose process died in so many cases is not called again
MLP = 4  # times the width, as GPT-2 and most others have it
SLOW = 1.0  # seconds; a large case that takes longer is run in the first dtype only
ROUGH = 0.1  # a relative tolerance above it (large scores in float32) is itself known to a digit at best


def check_layer(
    layer: Layer,
    backward: Any,
    *,
    dtypes: Sequence[str] = DTYPES,
    arrays: str = "auto",
    layout: str = "auto",
    seed: int = 0,
    strict: bool = False,
    name: str | None = None,
    **options: Any,
) -> LayerReport:
    """Runs all cases, compares every gradient, and looks for known mistakes if any is wrong."""
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    dtypes = checked_dtypes(dtypes, ALL_DTYPES)
    sizes, options = sizes_for(layer, options, getattr(backward, "sizes", None))
    chosen = layer.with_options(options)
    refuse_huge(layer, chosen, sizes)
    expected = Expected(layer.name, layer.arguments, layer.gradients, chosen, layer.upstream_optional)
    forms = backward.hold(expected) if isinstance(backward, IsolatedFunction) else forms_of(backward, expected)
    with np.errstate(all="ignore"), one_blas_thread():
        checker = _LayerChecker(layer, chosen, sizes)
        checker.choose(forms, arrays, layout, dtypes[0], seed)
        cases = checker.cases(seed)
        outcomes = checker.outcomes(cases, dtypes)
        outcomes = outcomes if strict else checker.without_refused_dtypes(outcomes)
        if not outcomes:
            raise ValueError(f"no case of {layer.name} can be computed in {' or '.join(dtypes)}; add float32")
        report = LayerReport(
            checker.layer, name or _name(backward), dict(checker.options), checker.plan.arrays, seed, strict, outcomes
        )
        report.not_given = [one for one in layer.gradients if one not in checker.layer.gradients]
        report.recognised = checker.recognised
        if report.outcomes and report.outcomes[0].dtype in NARROW:
            diagnose_in_float64(report, checker, cases)
        else:
            explain(report, checker.magnitudes)
            forgive_last_digits(report)
            diagnose_in_float32(report, checker, cases)
        forgive_changed_arguments(report)
        add_equations(report)
        if not report.passed:
            report.example = checker.example(report)
            report.chain = checker.chain(report)
    warn_of_lost_digits(report)
    report.warnings += [*checker.warnings, *hints(report)]
    return report


class _LayerChecker:
    """Calls the function on the cases and compares the results with the exact gradients."""

    plan: Plan

    def __init__(self, layer: Layer, options: Mapping[str, Any], sizes: Sizes = ANY) -> None:
        self.layer, self.options, self.sizes = layer, options, sizes
        self.dead: dict[str, Answer] = {}  # case -> the answer that ended the function's process
        self.absent: tuple[str, ...] = ()  # biases that it does not have, which are 0
        self.trial: Case | None = None  # the case in which it died before the others, in which it has other shapes
        self.warnings: list[str] = []
        self.magnitudes: dict[str, list[float]] = {}

    def choose(self, forms: Sequence[Form | RemoteForm], arrays: str, layout: str, dtype: str, seed: int) -> None:
        """Chooses how the function is called. If it returns only some of the gradients, it is judged on those."""
        for form in forms:
            kinds_of(form, arrays, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the wrong kind of arrays may cause warnings
            trial, chooser = self._choose(forms, arrays, layout, dtype, seed)
            for sizes in self._own_sizes(trial) if not trial.runs and not trial.answer.died else ():
                before, self.sizes = self.sizes, sizes
                again, chosen = self._choose(forms, arrays, layout, dtype, seed)
                if again.runs:
                    trial, chooser = again, chosen
                    break
                self.sizes = before
        self.plan, self.layer, self.absent = trial.plan, trial.layer, trial.absent
        if self.absent:
            self.warnings.append(f"without {', '.join(self.absent)}, which it does not have: taken as 0")
        if trial.answer.died:
            self.dead[chooser.case.name] = self._with_shapes(trial.answer, chooser.case.inputs)
            self.trial = chooser.case
        if chooser.hint:
            self.warnings.append(
                f"everything would be right in another layout: give layout={chooser.hint!r} if it is meant"
            )

    def _own_sizes(self, trial: Trial) -> Iterator[Sizes]:
        """The sizes in which an object may run that does not run in others: its own width, an MLP of 4 times that."""
        own = trial.plan.form.own_sizes
        found = []
        if own and not self.sizes.allowed and set(own) <= set(self.layer.sizes):
            found = [read_sizes({size: n}) for size, numbers in own.items() for n in numbers]
            yield from found
        found.insert(0, self.sizes)
        if "fc_weight" in self.layer.arguments:
            yield from (replace(sizes, mlp=MLP) for sizes in found)

    def _choose(
        self, forms: Sequence[Form | RemoteForm], arrays: str, layout: str, dtype: str, seed: int
    ) -> tuple[Trial, Chooser]:
        def taken(case: Case) -> Case:
            return case if forms[0].takes_upstream else replace(case, inputs=(*case.inputs[:-1], 1.0))

        def more() -> list[Case]:
            found = all_cases(self.layer, seed + 1, self.options, self.sizes)
            return [taken(one) for one in found if not one.large and not one.beyond]

        case = taken(first_case(self.layer, seed + 1, self.options, self.sizes))
        chooser = Chooser(self.layer, self.options, case, dtype, more)
        return chooser.choose(forms, arrays, layout), chooser

    @property
    def recognised(self) -> str:
        """What was recognised of the object, if anything had to be."""
        order = self.plan.order
        names = self.layer.gradients
        said = [self.plan.sentence, f"returned in the order {', '.join(names[i] for i in order)}" if order else ""]
        allowed = self.sizes.allowed if self.plan.form.own_sizes else None
        said += [f"{size} {', '.join(map(str, numbers))}, its own" for size, numbers in (allowed or {}).items()]
        said += [f"an MLP {self.sizes.mlp} times as wide as its input" if self.sizes.mlp else ""]
        return "; ".join(one for one in said if one)

    def cases(self, seed: int) -> list[Case]:
        found = all_cases(self.layer, seed, self.options, self.sizes)
        return self._as_taken(found)

    def _as_taken(self, found: list[Case]) -> list[Case]:
        """The cases without what the function does not take: the upstream gradient is 1 then, a bias 0."""
        found = [without(case, self.layer, self.absent) for case in found]
        if not self.plan.form.takes_upstream:
            found = [replace(case, inputs=(*case.inputs[:-1], 1.0)) for case in found]
        return found

    def call(self, case: Case, right: Gradients, dtype: str = "float64") -> Answer:
        if case.name in self.dead:
            return self.dead[case.name]
        answer = self.plan.call(self.layer, case.inputs, self.options, dtype, right)
        if answer.died:
            answer = self.dead[case.name] = self._with_shapes(answer, case.inputs)
        return answer

    def _with_shapes(self, answer: Answer, inputs: Sequence[Any]) -> Answer:
        """The answer of a function that died, with what it was called with."""
        inputs = self.plan.layout.calls(inputs)[0]
        shapes = (f"{name} {x.shape}" for name, x in zip(self.layer.arguments, inputs, strict=False) if _is_array(x))
        said = f"called with {', '.join(shapes)}"
        return replace(answer, problems=[replace(p, message=f"{p.message}; {said}") for p in answer.problems])

    @property
    def stopped(self) -> bool:
        """Whether the function has hung, or has died so often that it is not called again."""
        hung = any(p.kind == "timeout" for answer in self.dead.values() for p in answer.problems)
        return hung or len(self.dead) >= DEATHS_ALLOWED

    def outcomes(self, cases: Sequence[Case], dtypes: Sequence[str]) -> list[Outcome]:
        """The outcomes of all cases; stops where the function has hung or keeps dying."""
        found: list[Outcome] = []
        left: dict[str, dict[str, None]] = {}
        slow: dict[str, float] = {}
        narrow: dict[str, dict[str, None]] = {}
        for dtype in dtypes:
            for case in cases:
                if self.stopped and case.name not in self.dead:
                    left.setdefault(dtype, {})[case.name] = None
                elif dtype != dtypes[0] and (case.name in slow or case.name in self.dead):
                    continue
                else:
                    start = time.perf_counter()
                    outcome = self.outcome(case, dtype)
                    if outcome is None:
                        narrow.setdefault(dtype, {})[case.name] = None
                        continue
                    found.append(outcome)
                    if case.large and time.perf_counter() - start > SLOW:
                        slow[case.name] = time.perf_counter() - start
        for dtype, names in left.items():
            where = "" if dtype == dtypes[0] else f" in {dtype}"
            if where and dtypes[0] in left:
                continue  # the same, and more
            self.warnings.append(f"not run{where}, because the function hung or died before: {quoted(names)}")
        for dtype, names in narrow.items():
            self.warnings.append(f"not judged in {dtype}, in which the formula itself is off by half: {quoted(names)}")
        if slow and len(dtypes) > 1:
            seconds = max(slow.values())
            self.warnings.append(f"run in {dtypes[0]} only, because it took {seconds:.1f} seconds: {quoted(slow)}")
        return found

    def without_refused_dtypes(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Leaves out a dtype in which the function raises in every case, if it runs in another; that is a warning."""
        kept = list(outcomes)
        for dtype in dict.fromkeys(o.dtype for o in outcomes):
            here, others = ([o for o in kept if (o.dtype == dtype) == same] for same in (True, False))
            errors = [p.message for o in here for p in o.problems if p.kind == "raises"]
            if len(errors) == len(here) and any(o.answer.gradients is not None for o in others):
                kept = others
                self.warnings.append(f"not judged in {dtype}: it raises in every case, {errors[0]}; strict counts that")
        return kept

    def budgets(self, case: Case, dtype: str, right: Gradients) -> list[float] | None:
        """The allowed error of every gradient; None if 16 bits are too few for the formula itself."""
        magnitudes = self.magnitudes[case.name]
        if dtype not in NARROW:
            found = [allowed(m, dtype) for m in magnitudes]
            return [4 * b if ROUGH * norm(r) < b < norm(r) else b for b, r in zip(found, right, strict=True)]
        return narrow_budgets(self.layer, case, self.options, dtype, right, magnitudes)

    def outcome(self, case: Case, dtype: str) -> Outcome | None:
        """What the function returns in one case, and its errors; None if the case says nothing in this dtype."""
        given = rounded_case(case, dtype)
        exact = rounded_case(given, "float64")
        right = self.layer.reference(*exact.inputs, **self.options)
        if case.name not in self.magnitudes:  # does not depend on the dtype
            self.magnitudes[case.name] = layer_magnitudes(self.layer, exact, self.options)
        budgets = self.budgets(exact, dtype, right)
        if budgets is None:
            return None
        answer = self.call(given, right, dtype)
        again = answer if case.large or answer.gradients is None else self.call(given, right, dtype)
        if self.trial is not None and case.name == self.trial.name:
            exact = replace(self.trial, name=TRIAL)  # it is not called again
        out = Outcome(exact, dtype, answer, problems=list(answer.problems))
        if answer.gradients is None:
            return out
        for name, got, r, budget in zip(self.layer.gradients, answer.gradients, right, budgets, strict=True):
            if got.shape == r.shape:
                out.measured.append(measure(name, got, r, budget))
        out.problems += _differences(self.layer.gradients, answer.gradients, again, budgets, right)
        return out

    def example(self, report: LayerReport) -> Example | None:
        """A small numeric example of a wrong gradient: two tokens if those are wrong, else the worst entry."""
        if not report.wrong or self.stopped:
            return None
        for case in self._as_taken(two_tokens(self.layer, self.options, self.sizes)):
            right = self.layer.reference(*case.inputs, **self.options)
            answer = self.call(case, right)
            found = smallest_difference(self.layer, case, answer, right, report.wrong)
            if found is not None:
                return found
        return worst_entry(report, self.options)

    def chain(self, report: LayerReport) -> Chain | None:
        """Where the chain of a composite layer breaks, in one small case; None if that is not certain."""
        if not report.wrong or self.stopped or not is_composite(self.layer):
            return None
        found = small_case(self.layer, self.options, self.sizes)
        if found is None:
            return None
        (case,) = self._as_taken([found])
        answer = self.call(case, self.layer.reference(*case.inputs, **self.options))
        if answer.gradients is None:
            return None
        names = {f.name for f in report.diagnosis.findings} if report.diagnosis else set()
        named = [m for m in mistakes_of(self.layer, self.options) if m.name in names]
        pieces = [piece for m in named for piece in replaced_pieces(m)]
        chain = find_break(self.layer, self.options, case, answer.gradients, pieces)
        wrong = [*chain.follow, *chain.alone] if chain else []
        return chain if set(wrong) == set(report.wrong) else None


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


def _differences(
    names: Sequence[str], first: Sequence[Array], again: Answer, budgets: Sequence[float], right: Sequence[Array]
) -> list[Problem]:
    """Two calls with the same inputs must agree up to rounding; parallel sums may differ in the last bits."""
    if again.gradients is None or any(a.shape != b.shape for a, b in zip(first, again.gradients, strict=True)):
        return [Problem("random", "a second call with the same inputs fails or returns other shapes")]
    found = []
    for name, a, b, budget, r in zip(names, first, again.gradients, budgets, right, strict=True):
        gap = distance(a, b)
        if gap > budget:
            message = f"{name}: a second call with the same inputs differs by {gap / max(norm(a), norm(b)):.1e}"
            added = a.shape == r.shape and distance(b - a, r) <= 4 * budget + 1e-12 * norm(b)
            found.append(Problem("random", message, gap / budget if budget else math.inf, name, added))
    return found


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def checked_dtypes(dtypes: Sequence[str], known: Sequence[str] = DTYPES) -> list[str]:
    """Returns the dtypes, the most accurate first; raises a ValueError if one is unknown."""
    dtypes = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for dtype in dtypes:
        if dtype not in known:
            raise ValueError(f"unknown dtype {dtype!r}; choose from {', '.join(known)}")
    if not dtypes:
        raise ValueError(f"dtypes is empty; choose from {', '.join(known)}")
    return sorted(set(dtypes), key=known.index)


def _name(function: Any) -> str:
    if isinstance(function, (tuple, list)):
        return ", ".join(map(_name, function))
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
