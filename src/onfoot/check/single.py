"""Functions that compute in float32 whatever they are given: such gradients are judged, and named, in that precision.

A kernel that accumulates in float32, or a norm with `.float()` in it, is right to 7 digits. A mistake next to such a
step is as wrong as anywhere, but in float64 no formula has its numbers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onfoot.check.budget import UNIT
from onfoot.check.layer import Array
from onfoot.check.report import LayerReport, Outcome

FACTOR = UNIT["float32"] / UNIT["float64"]


def coarse(report: LayerReport) -> list[str]:
    """The gradients that are wrong in float64, but right to float32's rounding in every case that counts."""
    outcomes = _exact(report)
    measured = [m for o in outcomes for m in o.measured]
    seen = {name: [m for m in measured if m.gradient == name] for name in report.layer.gradients}
    return [
        name
        for name, found in seen.items()
        if len(found) == len(outcomes)
        and not all(m.ok for m in found)
        and all(m.error <= FACTOR * m.allowed for m in found)
    ]


def computes_in_float32(report: LayerReport) -> bool:
    """Whether a gradient of float64 inputs is only as accurate as float32, or has float32's numbers."""
    return bool(coarse(report)) or has_float32_numbers(report)


def is_as_accurate(report: LayerReport) -> bool:
    """Whether all that is wrong in float64 is wrong by float32's rounding only."""
    measured = [m for o in _exact(report) for m in o.measured]
    if all(m.ok for m in measured) or not all(m.error <= FACTOR * m.allowed for m in measured):
        return False
    problems = [p for o in _exact(report) for p in o.problems if p.kind != "mutates"]
    return all(p.size <= FACTOR for p in problems)


def relax(report: LayerReport) -> None:
    """Applies the float32 tolerance to the gradients that are that accurate."""
    names = coarse(report)
    for o in report.outcomes if names else ():
        if o.dtype == "float64":
            o.single_precision = names
            o.measured = [replace(m, allowed=FACTOR * m.allowed) if m.gradient in names else m for m in o.measured]
            o.problems = [p for p in o.problems if p.size > FACTOR]


def has_float32_numbers(report: LayerReport) -> bool:
    """Whether a gradient of float64 inputs has float32's numbers in every case that counts."""
    outcomes = [o for o in _exact(report) if o.answer.gradients is not None]
    gradients = range(len(report.layer.gradients)) if outcomes else ()
    return any(all(_is_rounded((o.answer.gradients or [])[g]) for o in outcomes) for g in gradients)


def _is_rounded(answer: Array) -> bool:
    """Whether every entry is a float32 number, and most of them have more than half of its digits."""
    with np.errstate(over="ignore"):
        if not np.isfinite(answer).all() or not np.array_equal(answer, answer.astype(np.float32)):
            return False
    fraction, exponent = np.frexp(answer)
    few = answer == np.ldexp(np.round(np.ldexp(fraction, 12)), exponent - 12)  # 0, 1, 0.5: they say nothing
    return 2 * int(few.sum()) < answer.size


def _exact(report: LayerReport) -> list[Outcome]:
    return [o for o in report.outcomes if o.dtype == "float64" and report.counts(o)]
