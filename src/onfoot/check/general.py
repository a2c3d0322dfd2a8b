"""Checks any backward pass against finite differences of its forward pass.

For a random upstream gradient u and random directions v, ⟨v, Jᵗu⟩ (backward pass) must equal ⟨u, J v⟩ (finite
differences of the forward pass). That is cheap and shows which argument is wrong. Only a wrong argument is checked
entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onfoot.check.budget import ALLOWED, norm
from onfoot.check.call import Answer, Problem
from onfoot.check.general_report import Agreement, GradientReport
from onfoot.check.known import checked_dtypes
from onfoot.check.layer import Array
from onfoot.check.locate import pattern
from onfoot.check.numeric import Derivative
from onfoot.check.pair import Pair

Probes = dict[int, list[tuple[Array, Derivative]]]  # index of a gradient -> directions and the derivatives along them
ENTRIES = 400  # at most this many entries of a wrong argument are checked one by one
ENTRY = 1e-6  # an entry is wrong if its error exceeds this fraction of the largest entry


def gradients(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    wrt: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    saved: bool = False,
    dtypes: Sequence[str] = ("float64",),
    directions: int = 3,
    seed: int = 0,
) -> GradientReport:
    """Checks `backward(*inputs, dout)` against finite differences of `forward(*inputs)`.

    `inputs` are NumPy arrays, PyTorch tensors, or other values, which are passed unchanged. Gradients are expected for
    the floating-point arrays among them, in order, or for the indices in `wrt`. `saved=True` selects onfoot's own
    convention: `y, saved = forward(*inputs)` and `backward(dy, saved)`. Everything is computed in float64; if `dtypes`
    contains "float32", the backward pass is also run in float32, with the tolerance that rounding explains.
    """
    dtypes = checked_dtypes(dtypes)
    pair = Pair(forward, backward, inputs, wrt, names, saved)
    rng = np.random.default_rng(seed)
    name = getattr(backward, "__qualname__", type(backward).__name__)
    report = GradientReport(name, pair.names, pair.shapes, pair.arrays, seed)
    with np.errstate(all="ignore"):
        y = _first_value(pair, report)
        if y is not None:
            u = rng.standard_normal(y.shape)
            noise = pair.noise(u, rng)
            probes: Probes = {}
            for dtype in dtypes:
                _check(pair, report, u, noise, dtype, directions, rng, probes)
    return report


def _first_value(pair: Pair, report: GradientReport) -> Array | None:
    """Returns the output of the forward pass, or None if it cannot be differentiated."""
    try:
        y, again = pair.value(), pair.value()
    except (Exception, SystemExit) as error:
        report.problems.append(Problem("raises", f"{type(error).__name__}: {error} (in the forward pass)"))
        return None
    if y.dtype.kind != "f":
        report.problems.append(
            Problem("type", f"the forward pass returns {y.dtype}; expected one floating-point array")
        )
        return None
    if not np.isfinite(y).all():
        bad = int((~np.isfinite(y)).sum())
        report.problems.append(Problem("nan", f"the forward pass: {bad} of {y.size} entries are nan or infinite"))
        return None
    if y.tobytes() != again.tobytes():
        report.problems.append(Problem("random", "the forward pass returns different values for the same inputs"))
        return None
    if y.dtype != np.float64:
        report.warnings.append(
            f"the forward pass computes in {y.dtype}, which limits the accuracy of the finite differences"
        )
    return y


def _check(
    pair: Pair,
    report: GradientReport,
    u: Array,
    noise: float,
    dtype: str,
    directions: int,
    rng: np.random.Generator,
    probes: Probes,
) -> None:
    """Checks every argument, with the backward pass in one dtype."""
    answer = pair.gradients(u, dtype)
    report.problems += [p for p in answer.problems if p not in report.problems]
    if answer.gradients is None or any(p.kind in ("shape", "nan") for p in answer.problems):
        return
    if not _same(answer, pair.gradients(u, dtype)):
        report.problems.append(Problem("random", "the backward pass returns different values for the same inputs"))
    spreads = pair.spreads(u, dtype, rng)
    for position, (name, grad, spread) in enumerate(zip(pair.names, answer.gradients, spreads, strict=True)):
        found = []
        if position not in probes:
            drawn = [pair.scale(position) * rng.standard_normal(grad.shape) for _ in range(directions)]
            probes[position] = [(v, pair.derivative(position, v, u, noise)) for v in drawn]
        for v, numeric in probes[position]:
            analytic = float(np.sum(v * grad))
            allowed = 10 * (0 if numeric.has_kink else numeric.error) + ALLOWED * norm(v * spread)
            ok = numeric.agrees(analytic, allowed)
            found.append(Agreement(name, dtype, analytic, numeric.value, allowed, numeric.has_kink, ok))
        if not all(a.ok for a in found) and name not in report.where:
            where, any_wrong = _locate(pair, position, grad, u, noise, rng)
            if not any_wrong and all(a.ok or a.kink for a in found):
                for a in found:  # where several kinks meet, one-sided derivatives exist only per entry
                    a.ok = True
            else:
                report.where[name] = where
        if any(a.kink for a in found):
            note = f"{name}: the function has kinks here, where any value between the one-sided derivatives is accepted"
            report.warnings += [note] if note not in report.warnings else []
        report.agreements += found


def _same(answer: Answer, again: Answer) -> bool:
    first, second = answer.gradients or [], again.gradients or []
    return len(first) == len(second) and all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def _locate(
    pair: Pair, position: int, grad: Array, u: Array, noise: float, rng: np.random.Generator
) -> tuple[str, bool]:
    """Checks single entries; returns a description of the wrong ones, and whether there are any."""
    chosen = np.arange(grad.size) if grad.size <= ENTRIES else np.sort(rng.permutation(grad.size)[:ENTRIES])
    right, wrong = np.zeros(grad.shape), np.zeros(grad.shape, dtype=bool)
    scale, largest = pair.scale(position), float(np.abs(grad).max(initial=0))
    for flat in chosen:
        index = np.unravel_index(flat, grad.shape)
        v = np.zeros(grad.shape)
        v[index] = scale
        numeric = pair.derivative(position, v, u, noise)
        right[index] = numeric.value / scale
        allowed = 10 * (0 if numeric.has_kink else numeric.error) + ENTRY * scale * largest
        wrong[index] = not numeric.agrees(float(grad[index]) * scale, allowed)
    if not wrong.any():
        return f"no single entry is wrong by more than {ENTRY:.0e} of the largest", False
    description = (
        pattern(wrong) if grad.size <= ENTRIES else f"of {ENTRIES} entries sampled, {int(wrong.sum())} are wrong"
    )
    return description + _worst(grad, right, wrong) + _ratio(grad, right, wrong), True


def _worst(grad: Array, right: Array, wrong: Array) -> str:
    index = np.unravel_index(int(np.argmax(np.where(wrong, np.abs(grad - right), -1))), grad.shape)
    return f"; worst at {[int(i) for i in index]}: got {grad[index]:.6g}, expected {right[index]:.6g}"


def _ratio(grad: Array, right: Array, wrong: Array) -> str:
    """Describes a factor that all wrong entries share, if any."""
    checked = wrong & (np.abs(right) > 1e-3 * np.abs(right).max(initial=0))
    if checked.sum() < 2:
        return ""
    if not grad[checked].any():
        return "; these are 0"
    ratios = grad[checked] / right[checked]
    if np.ptp(ratios) > 1e-4 * np.abs(ratios).max():
        return ""
    factor = float(np.median(ratios))
    return (
        "; these have the wrong sign"
        if abs(factor + 1) < 1e-4
        else f"; these are {factor:.5g} times the correct values"
    )
