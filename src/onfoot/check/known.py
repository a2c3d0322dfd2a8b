"""Checks a user's backward pass of a known layer against the exact gradients, for every case and dtype."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.budget import DTYPES, UNIT, allowed, distance, layer_magnitudes, norm
from onfoot.check.call import Answer, Problem
from onfoot.check.candidate import Evidence
from onfoot.check.case_sizes import ANY, Sizes, all_cases, first_case, read_sizes, sizes_for
from onfoot.check.chain import Chain, find_break, is_composite, small_case
from onfoot.check.diagnose import Diagnosis, Finding, diagnose
from onfoot.check.equations import equation_of
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
from onfoot.check.single import FACTOR, coarse, computes_in_float32, has_float32_numbers, is_as_accurate, relax
from onfoot.threads import one_blas_thread

ALL_DTYPES = (*DTYPES, *NARROW)  # the most accurate first
MIN_FINITE = 2  # cases; fewer say too little if the others have nan
TRIAL = "the first call"  # in which it is found out how the function is called
DEATHS_ALLOWED = 3  # a function whose process died in so many cases is not called again
MLP = 4  # times the width, as GPT-2 and most others have it
SLOW = 1.0  # seconds; a large case that takes longer is run in the first dtype only
LOW_ACCURACY = "a step computes in float32 or loses digits, or a constant is written with few digits"
DIGITS = 1e-9  # a constant that is closer to the right one is the right one, written with 9 digits or more
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
            _diagnose_in_float64(report, checker, cases)
        else:
            _diagnose(report, checker.magnitudes)
            _forgive_last_digits(report)
            _diagnose_in_float32(report, checker, cases)
        _forgive_in_place(report)
        _add_equations(report)
        if not report.passed:
            report.example = checker.example(report)
            report.chain = checker.chain(report)
    _warn(report)
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
            self.warnings.append(f"not run{where}, because the function hung or died before: {_quoted(names)}")
        for dtype, names in narrow.items():
            self.warnings.append(f"not judged in {dtype}, in which the formula itself is off by half: {_quoted(names)}")
        if slow and len(dtypes) > 1:
            seconds = max(slow.values())
            self.warnings.append(f"run in {dtypes[0]} only, because it took {seconds:.1f} seconds: {_quoted(slow)}")
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


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"“{name}”" for name in names)


def _diagnose(report: LayerReport, magnitudes: Mapping[str, list[float]], every: bool = False) -> None:
    """Looks for known mistakes, in the most accurate requested dtype; by `every` means also if that is float32's."""
    dtype = report.outcomes[0].dtype
    outcomes = [o for o in report.outcomes if o.dtype == dtype and o.answer.gradients is not None]
    counted = [o for o in outcomes if report.counts(o)]
    small, large = ([o for o in counted if o.case.large == size] for size in (False, True))
    only_large = not any(map(_is_wrong, small)) and any(map(_is_wrong, large))
    if report.failed and not any(map(_is_wrong, counted)):
        report.diagnosis = _of_calls(report) or _of_integers(report)
        return  # it raises or dies; what it does beyond the contract is not the cause
    seen = large if only_large else small if any(map(_is_wrong, small)) else [o for o in outcomes if not o.case.large]
    finite = [o for o in seen if all(np.isfinite(g).all() for g in o.answer.gradients or [])]
    some = MIN_FINITE <= len(finite) < len(seen)
    report.diagnosis = _of_calls(report)
    if report.diagnosis is not None:
        return
    brief = (computes_in_float32(report) and not every) or not report.failed
    report.diagnosis = _diagnosis(report, seen, magnitudes, brief=some or brief)
    if report.diagnosis is None or report.diagnosis.complete or not some or not report.failed:
        return
    without = _diagnosis(report, finite, magnitudes, brief)  # nan in one case must not silence the others
    if without is None or len(without.unexplained) >= len(report.diagnosis.unexplained):
        report.diagnosis = _diagnosis(report, seen, magnitudes, brief)
    else:
        report.diagnosis = without
        left_out = _quoted(o.case.name for o in seen if o not in finite)
        report.warnings.append(f"the diagnosis leaves out the cases with nan or infinite entries: {left_out}")


def _of_integers(report: LayerReport) -> Diagnosis | None:
    """The diagnosis of gradients that are integer arrays; None if there are none."""
    messages = dict.fromkeys(p.message for o in report.failed for p in o.problems if p.kind == "type")
    names = [g for g in report.layer.gradients if any(m.startswith(f"{g} is an array of int") for m in messages)]
    if not names:
        return None
    name = f"{', '.join(names)}: an integer array, which cuts off the fractions"
    explains = "The gradient is gathered in an array whose dtype is that of the ids or of a list of integers."
    fix = "gather it in floating point: np.zeros_like(weight), or zeros of dout's dtype"
    return Diagnosis([Finding(name, explains, "", fix, "", names)], residual=0.0, cases=len(report.failed))


def _of_calls(report: LayerReport) -> Diagnosis | None:
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


def _diagnose_in_float64(report: LayerReport, checker: _LayerChecker, cases: Sequence[Case]) -> None:
    """Looks for known mistakes in float64, or float32 if it raises in that: 16 bits leave too many that fit."""
    if report.passed:
        return
    before, checker.warnings = checker.warnings, []
    for dtype in DTYPES:
        exact = replace(report, outcomes=checker.outcomes(cases, [dtype]))
        if not any(o.answer.gradients is None for o in exact.outcomes):
            _diagnose(exact, checker.magnitudes)
            _diagnose_in_float32(exact, checker, cases)
            report.diagnosis = exact.diagnosis
            if exact.passed and report.wrong:
                before.append(
                    f"right in {dtype}: in {report.outcomes[0].dtype} it loses more digits than rounding explains"
                )
            break
    checker.warnings = before


def _forgive_last_digits(report: LayerReport) -> None:
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


def _diagnose_in_float32(report: LayerReport, checker: _LayerChecker, cases: Sequence[Case]) -> None:
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
    _diagnose(single, checker.magnitudes)
    left = len(found.unexplained) if found and found.findings else math.inf
    if single.diagnosis is None or not single.diagnosis.findings:
        _diagnose(report, checker.magnitudes, every=True)  # it was brief: most such functions are named in float32
    elif len(single.diagnosis.unexplained) < left:
        report.diagnosis = single.diagnosis
        report.warnings.append("named in float32: the gradients of float64 inputs have the digits of float32")


def _diagnosis(
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


def _forgive_in_place(report: LayerReport) -> None:
    """Arguments modified in place are a warning, if the results are right."""
    if any(not m.ok for o in report.failed for m in o.measured):
        return
    messages: dict[str, None] = {}
    for o in report.outcomes:
        messages |= dict.fromkeys(p.message for p in o.problems if p.kind == "mutates")
        o.problems = [p for p in o.problems if p.kind != "mutates"]
    told = [m for m in messages if not any(other.startswith(f"{m} (") for other in messages)]  # with the line, once
    report.warnings += [f"{message}: whoever uses it afterwards gets other values" for message in told]


def _add_equations(report: LayerReport) -> None:
    """Gives a finding that violates no equation in particular that of its first gradient."""
    for i, finding in enumerate(report.diagnosis.findings if report.diagnosis else ()):
        if not finding.equation and finding.gradients and report.diagnosis is not None:
            equation = equation_of(report.layer.name, finding.gradients[0], report.options.get("form", ""))
            report.diagnosis.findings[i] = replace(finding, equation=equation)


def _warn(report: LayerReport) -> None:
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
        cases = _quoted(o.case.name for o in lost if o.dtype == dtype)
        report.warnings.append(f"correct in float64, but the {dtype} error is larger than rounding explains: {cases}")


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
