"""Finds a change of one gradient, relative to a candidate: a factor, a transpose, another gradient in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from onfoot.check.candidate import Candidate, Change, Evidence
from onfoot.check.factors import candidates, recognise
from onfoot.check.layer import Array, Case, Gradients, transposed

GATE = {"float64": 1e-6, "float32": 1e-2}  # largest relative residual that a factor may leave


def find_change(evidence: Evidence, base: Candidate, g: int) -> Change | None:
    """Returns the change of gradient g that makes the candidate fit, or None."""
    for change in _possible(evidence, base, g):
        if evidence.fits(Candidate(base.mistakes, (change,)), g):
            return change
    return None


def _possible(evidence: Evidence, base: Candidate, g: int) -> Iterator[Change]:
    names = evidence.layer.gradients
    if not any(evidence.informative(i, g) for i in range(len(evidence.cases))):
        yield Change(g, f"{names[g]} is 0 everywhere", f"compute and return {names[g]}", _zeros(g))
        return
    yield from _factor(evidence, base, g)
    yield Change(g, f"{names[g]} is transposed", f"transpose {names[g]}", lambda grads, case: transposed(grads[g]))
    for h, other in enumerate(names):
        if h != g:
            fix = f"return the gradients in the order {', '.join(names)}"
            yield Change(g, f"{other} is returned in place of {names[g]}", fix, _other(h))


def _zeros(g: int) -> Callable[[Gradients, Case], Array]:
    return lambda grads, case: np.zeros_like(grads[g])


def _other(h: int) -> Callable[[Gradients, Case], Array]:
    return lambda grads, case: grads[h]


def _factor(evidence: Evidence, base: Candidate, g: int) -> Iterator[Change]:
    """A factor that is the same number or the same quantity in every case."""
    found = []
    gate = GATE[evidence.dtype]
    for i, answers in enumerate(evidence.answers):
        if not evidence.informative(i, g):
            continue
        ran, answer = evidence.run(base, i), answers[g]
        if ran is None or ran[g].shape != answer.shape or not np.isfinite(answer).all():
            return
        square = float(np.sum(ran[g] * ran[g]))
        factor = float(np.sum(ran[g] * answer)) / square if square else 0.0
        if factor == 0 or np.linalg.norm(answer - factor * ran[g]) > gate * evidence.norms[i][g]:
            return
        condition = evidence.magnitudes[i][g] / evidence.norms[i][g]
        found.append((condition, i, factor))
    measured = [(evidence.cases[i], factor) for _, i, factor in found]
    signs = {np.sign(factor) for _, factor in measured}
    if len(signs) != 1:
        return
    known = recognise([(case.sizes, abs(factor)) for case, factor in measured], 10 * gate)
    name, sign = evidence.layer.gradients[g], int(signs.pop())
    if known is not None:
        yield _named(g, name, sign, *known, measured[0][0])
    elif (
        not base.mistakes
        and len(measured) > 1
        and np.ptp([factor for _, factor in measured]) <= gate * abs(measured[0][1])
    ):
        yield _constant(g, name, min(found)[2])  # from the best-conditioned case


def _named(g: int, name: str, sign: int, quantity: str, times: bool, case: Case) -> Change:
    def value(case: Case) -> float:
        size = candidates(case.sizes)[quantity] if quantity else 1.0
        return sign * (size if times else 1 / size if size else math.inf)

    def apply(grads: Gradients, case: Case) -> Array:
        return value(case) * grads[g]

    parts = [f"{name} has the wrong sign"] if sign < 0 else []
    fix = [f"negate {name}"] if sign < 0 else []
    if quantity:
        size = candidates(case.sizes)[quantity]
        shown = quantity if quantity.isdigit() else f"{quantity} = {size:.3g}"
        parts.append(f"{'is' if parts else f'{name} is'} {shown} times too {'large' if times else 'small'}")
        fix.append(f"{'divide' if times else 'multiply'} {name} by {quantity}")
    return Change(g, " and ".join(parts), ", ".join(fix), apply)


def _constant(g: int, name: str, factor: float) -> Change:
    description = f"{name} is {factor:.6g} times the correct gradient in every case"
    return Change(g, description, f"divide {name} by {factor:.6g}", lambda grads, case: factor * grads[g])
