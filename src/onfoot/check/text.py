"""The report of a known layer as text and as a dict."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onfoot.check.call import NOTHING
from onfoot.check.diagnose import Diagnosis, Finding
from onfoot.check.equations import EQUATIONS, page_of
from onfoot.check.report import LayerReport, Measured, Outcome

WIDTH = 100
WIDEST_TABLE = 6  # gradients; if there are more, one row per gradient with its worst case


def layer_text(report: LayerReport) -> str:
    """The report as text: contract, errors, verdict, diagnosis."""
    lines = [*heading(report), ""]
    if any(o.measured for o in report.outcomes):
        for dtype in dict.fromkeys(o.dtype for o in report.outcomes):
            lines += table(report, dtype)
        lines.append("")
    lines += [*verdict(report), *problems(report)]
    if report.diagnosis is not None and not report.passed:
        lines += ["", *diagnosis_text(report.diagnosis)]
    if report.chain is not None:
        lines += ["", "Where the chain breaks:", *wrapped(str(report.chain), "  ", 0)]
        lines += wrapped(f"Right: {report.chain.formula}", "  ") if report.chain.formula else []
    if report.example is not None:
        lines += ["", *report.example.lines()]
    lines += beyond(report)
    for warning in report.warnings:
        lines += ["", *wrapped(f"note: {warning}", "")]
    return "\n".join(lines)


def heading(report: LayerReport) -> Iterator[str]:
    layer = report.layer
    options = "".join(f" · {name}={value}" for name, value in report.options.items())
    arrays = {"numpy": "NumPy arrays", "torch": "PyTorch tensors", "jax": "JAX arrays"}[report.arrays]
    yield f"{layer.name} · {report.function}"
    for line in (layer.signature, *layer.contract):
        yield from wrapped(line, "  ")
    yield f"  {arrays}{options} · seed {report.seed}"
    if report.recognised:
        yield from wrapped(f"recognised: {report.recognised}", "  ")
    if report.not_given:
        yield from wrapped(f"not given, and not judged: {', '.join(report.not_given)}", "  ")


def shown(value: float) -> str:
    """An error with two digits."""
    if math.isnan(value):
        return "nan"
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-2 or value >= 1e4 else f"{value:.2g}"


def _mark(m: Measured | None) -> str:
    """A table cell: the error, with ✓ or ✗."""
    return "–  " if m is None else f"{shown(m.error)} {'✓' if m.ok else '✗'}"


def table(report: LayerReport, dtype: str) -> Iterator[str]:
    """Errors relative to the norm of the correct gradient: one row per case, or per gradient if there are many."""
    outcomes = [o for o in report.outcomes if o.dtype == dtype]
    gradients = report.layer.gradients
    if dtype != report.outcomes[0].dtype and (report.wrong or all(o.ok for o in outcomes if report.counts(o))):
        yield f"  {_summary([o for o in outcomes if report.counts(o)], dtype)}"
        return
    if len(gradients) > WIDEST_TABLE:
        yield from _long_table(outcomes, gradients, dtype)
        return
    label = max(len(_label(o)) for o in outcomes) + 2
    yield f"  {dtype:<{label}}" + "".join(f"{name:>14}" for name in gradients)
    for o in outcomes:
        by_name = {m.gradient: m for m in o.measured}
        cells = "".join(f"{_mark(by_name.get(name)):>14}" for name in gradients)
        yield f"  {_label(o):<{label}}{cells}" + ("" if report.counts(o) else "   not counted")


def _summary(outcomes: Sequence[Outcome], dtype: str) -> str:
    """One line for the second dtype."""
    wrong = dict.fromkeys(m.gradient for o in outcomes for m in o.measured if not m.ok)
    if wrong:
        return f"{dtype}: {', '.join(wrong)} wrong as well"
    worst = max((m for o in outcomes for m in o.measured), key=lambda m: m.error, default=None)
    return f"{dtype}: nothing to compare" if worst is None else f"{dtype}: all agree, worst error {shown(worst.error)}"


def _label(outcome: Outcome) -> str:
    return f"{outcome.case.name} {tuple(outcome.case.inputs[0].shape)}"


def _long_table(outcomes: Sequence[Outcome], gradients: Sequence[str], dtype: str) -> Iterator[str]:
    yield f"  {dtype:<18}{'worst error':>14}   in"
    for name in gradients:
        measured = [(m, o) for o in outcomes for m in o.measured if m.gradient == name]
        if measured:
            m, o = max(measured, key=lambda one: (not one[0].ok, math.isnan(one[0].error), one[0].error))
            yield f"  {name:<18}{_mark(m):>14}   {_label(o)}"
        else:
            yield f"  {name:<18}{_mark(None):>14}"


def verdict(report: LayerReport) -> Iterator[str]:
    if report.passed:
        cases = len({o.case.name for o in report.outcomes if report.counts(o)})
        dtypes = " and ".join(dict.fromkeys(o.dtype for o in report.outcomes if report.counts(o)))
        judged = f"{', '.join(report.layer.gradients)} agree" if report.not_given else "every gradient agrees"
        if report.not_given and len(report.layer.gradients) == 1:
            judged += "s"
        yield f"✓ passes: {judged} to rounding, in {cases} cases, in {dtypes}"
        return
    yield f"✗ wrong: {', '.join(report.wrong)}" if report.wrong else "✗ fails"
    yield from size_dependent(report)
    for name in report.wrong[:4]:
        bad = ((o, m) for o in report.failed for m in o.measured if m.gradient == name and not m.ok)
        o, m = next(bad, (None, None))
        if o is None or m is None or math.isnan(m.error):  # listed below, with the problems
            continue
        plain = report.diagnosis.plain.get(name, "") if report.diagnosis else ""
        kind = "error" if m.absolute else "relative error"
        detail = f"{kind} {shown(m.error)} in “{o.case.name}”, {shown(m.allowed)} allowed; {m.where}"
        yield from wrapped(f"{plain or name}: {detail}", "  ")


def one_line(report: LayerReport) -> str:
    """The result in one line, with what was found first."""
    if report.passed:
        return f"passes: {', '.join(report.layer.gradients)}"
    names = (
        [f.name + (f", {f.value}" if f.value else "") for f in report.diagnosis.findings] if report.diagnosis else []
    )
    first, where = next(((p, _only_in(report, [o])) for o in report.failed for p in o.problems), (None, ""))
    if not report.wrong:
        verb = "it raises " if first is not None and first.kind == "raises" else ""
        said = [f"{verb}{first.message}{where}"] if first is not None and not (names and first.kind == "random") else []
        return f"fails: {'; '.join([*said, *names])}" if said or names else "fails"
    if not names and first is not None:
        names = [first.message]
    return f"wrong: {', '.join(report.wrong)}; {'; '.join(names) or 'no known mistake explains it'}"


def size_dependent(report: LayerReport) -> Iterator[str]:
    """Says so if only large cases are wrong."""
    bad = [o for o in report.failed if any(not m.ok for m in o.measured)]
    if bad and all(o.case.large for o in bad) and any(not o.case.large for o in report.outcomes):
        small = [np.shape(o.case.inputs[0]) for o in report.outcomes if not o.case.large]
        largest = max(max(shape) for shape in small)
        yield from wrapped(
            f"Right in every case with sizes up to {largest}, wrong only in larger ones: look for a tile, the last "
            "partly filled tile, a stride or a buffer of fixed size.",
            "  ",
        )


def beyond(report: LayerReport) -> Iterator[str]:
    """The cases beyond the contract in which the function differs."""
    cases = {o.case.name: o.case.beyond for o in report.outcomes if not report.counts(o) and not o.ok}
    if not cases or not report.passed:
        return
    yield ""
    yield "Not counted (use strict=True or --strict to count them):"
    for name, why in cases.items():
        yield from wrapped(f"“{name}”: {why}", "  ")
    if report.diagnosis is not None:
        for finding in report.diagnosis.findings:
            yield from wrapped(
                f"Diagnosis of these cases: {finding.name}. {finding.explains} Fix: {finding.fix}.", "  "
            )


def problems(report: LayerReport) -> Iterator[str]:
    """Problems other than wrong values: each once, with the number of cases it occurs in."""
    occurrences: dict[tuple[str, str], list[Outcome]] = {}
    for o in report.failed:
        for p in o.problems:
            occurrences.setdefault((p.kind, p.message), []).append(o)
    if not occurrences:
        return
    total = len([o for o in report.outcomes if report.counts(o)])
    seen: dict[str, int] = {}
    for (kind, message), where in occurrences.items():
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] > 3:  # the shapes differ from case to case, the problem does not
            continue
        detail = f"“{where[0].case.name}”" if len(where) == 1 else f"{len(where)} of {total} cases"
        detail += _only_in(report, where)
        verb = "it raises " if kind == "raises" else ""
        label = "" if message.startswith(NOTHING) else f"{kind}: "
        yield from wrapped(f"{label}{verb}{message} ({detail})", "  ")
    for kind, count in seen.items():
        if count > 3:
            yield f"  {kind}: and {count - 3} more like these"
    answers = [g for o in report.outcomes for g in o.answer.gradients or []]
    if report.layer.all_nan and answers and all(np.isnan(g).all() for g in answers):
        yield from wrapped(f"every entry is nan, which has many causes; a common one is {report.layer.all_nan}", "  ")


def _only_in(report: LayerReport, outcomes: Sequence[Outcome]) -> str:
    """“ in float32” if that is the only dtype in which something happens, and not the first that was run."""
    (dtype, *more) = dict.fromkeys(o.dtype for o in outcomes)
    return "" if more or dtype == report.outcomes[0].dtype else f" in {dtype}"


def diagnosis_text(diagnosis: Diagnosis) -> Iterator[str]:
    where = f"{diagnosis.cases} case{'s' if diagnosis.cases != 1 else ''}"
    n, known = len(diagnosis.findings), all(f.explains for f in diagnosis.findings)
    if n:
        what = f"{n} {'known mistake' if known else 'cause'}{'s' if n > 1 else ''}"
        partial = " (partial)" if diagnosis.unexplained else ""
        yield f"Diagnosis{partial}: {what}, residual {shown(diagnosis.residual)} on the same {where}"
    for i, finding in enumerate(diagnosis.findings, 1):
        yield ""
        yield from finding_text(i, finding)
    for names in diagnosis.also:
        yield from wrapped(f"The same numbers also fit: {' + '.join(names)}", "     ")
    if diagnosis.unexplained:
        yield "" if n else "Diagnosis: none"
        left = ", ".join(diagnosis.unexplained)
        yield from wrapped(f"No known mistake, pair of mistakes or simple factor explains {left}.", "")
        near = [one for one in diagnosis.candidates if one[1] > 1e-6][:2]
        for mistakes, residual in near:
            yield from wrapped(f"closest, but not a match: {' + '.join(mistakes)}, residual {shown(residual)}", "  ")


def finding_text(i: int, finding: Finding) -> Iterator[str]:
    value = f", {finding.value}" if finding.value else ""
    yield f"  {i}. {finding.name}{value}   [{', '.join(finding.gradients)}]"
    if finding.explains:
        yield from wrapped(finding.explains, "     ", 0)
    if finding.equation:
        verb = "violates" if finding.explains else "right   "  # a gradient's own equation
        yield from wrapped(f"{verb}  eq {finding.equation}: {EQUATIONS[finding.equation]}", "     ", 10)
    yield from wrapped(f"fix       {finding.fix}", "     ", 10)
    if finding.equation:
        yield f"     read      {page_of(finding.equation)}"
    if finding.errata:
        yield f"     see       docs/errata.md, {finding.errata}"


def wrapped(text: str, indent: str, hanging: int = 2) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + " " * hanging)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def layer_dict(report: LayerReport) -> dict[str, Any]:
    out: dict[str, Any] = {
        "layer": report.layer.name,
        "function": report.function,
        "passed": report.passed,
        "wrong": report.wrong,
        "arrays": report.arrays,
        "options": report.options,
        "seed": report.seed,
        "strict": report.strict,
        "expected": report.layer.signature,
        "recognised": report.recognised,
        "not_given": report.not_given,
        "warnings": report.warnings,
        "cases": [outcome_dict(report, o) for o in report.outcomes],
        "example": None if report.example is None else report.example.to_dict(),
        "chain": None if report.chain is None else report.chain.to_dict(),
        "diagnosis": None,
    }
    if report.diagnosis is not None:
        d = report.diagnosis
        out["diagnosis"] = {
            "complete": d.complete,
            "residual": _number(d.residual),
            "cases": d.cases,
            "findings": [finding_dict(f) for f in d.findings],
            "also": d.also,
            "unexplained": d.unexplained,
            "candidates": [{"mistakes": names, "residual": _number(r)} for names, r in d.candidates],
        }
    return out


def finding_dict(finding: Finding) -> dict[str, Any]:
    formula = EQUATIONS.get(finding.equation, "")
    shown = {name: value for name, value in vars(finding).items() if name != "off"}
    return {**shown, "formula": formula, "page": page_of(finding.equation) if finding.equation else ""}


def outcome_dict(report: LayerReport, outcome: Outcome) -> dict[str, Any]:
    return {
        "case": outcome.case.name,
        "dtype": outcome.dtype,
        "shapes": {
            name: list(getattr(x, "shape", ()))
            for name, x in zip(report.layer.arguments, outcome.case.inputs, strict=False)
        },
        "counted": report.counts(outcome),
        "ok": outcome.ok,
        "problems": [p.to_dict() for p in outcome.problems],
        "gradients": {
            m.gradient: {"error": _number(m.error), "allowed": m.allowed, "absolute": m.absolute, "ok": m.ok}
            for m in outcome.measured
        },
    }
