"""A numeric example of a wrong gradient, small enough to be computed by hand: what was returned, and what is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.check.budget import distance, norm
from onfoot.check.call import Answer
from onfoot.check.case_sizes import FIRST, Sizes
from onfoot.check.layer import Array, Case, Gradients, Layer, is_float_array

if TYPE_CHECKING:
    from onfoot.check.report import LayerReport

TINY = {"batch": 1, "heads": 1, "tokens": 2, "width": 3, "head_dim": 2, "vocabulary": 3}
FEW = 50  # numbers in all arguments, which are then printed
LARGEST = 60  # numbers in an argument of a small example
DIGITS = 3  # that are shown, if the numbers differ in them
VISIBLE = 5e-3  # relative difference that shows in three digits


@dataclass(frozen=True)
class Example:
    """One gradient of one case, as returned and as it should be; or one entry of it, at `index`."""

    case: str
    gradient: str
    yours: Array
    right: Array
    inputs: Mapping[str, Any]  # empty if there are too many numbers to show
    index: tuple[int, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "gradient": self.gradient,
            "index": None if self.index is None else list(self.index),
            "yours": _plain(self.yours),
            "right": _plain(self.right),
            "inputs": {name: _plain(x) for name, x in self.inputs.items()},
        }

    @property
    def digits(self) -> int:
        """The number of digits in which the two differ."""
        return next((n for n in range(DIGITS, 17) if _shown(self.yours, n) != _shown(self.right, n)), 17)

    def lines(self) -> list[str]:
        """The example as text."""
        if self.index is not None:
            place = f"{self.gradient}{list(self.index)}" if self.index else self.gradient
            yours, right = (_shown(x, self.digits) for x in (self.yours, self.right))
            return [f"Example: {place} in “{self.case}” is {yours}; right is {right}"]
        few = sum(np.size(x) for x in self.inputs.values()) <= FEW
        shown = self.inputs if few else {}
        label = max(len(name) for name in (*shown, self.gradient)) + 2
        out = [f"Example with two tokens{'' if few else ' (its inputs are in the JSON report)'}:"]
        out += [f"  {name:<{label}}{_shown(x)}" for name, x in shown.items()]
        out.append(f"  {self.gradient:<{label}}yours  {_shown(self.yours, self.digits)}")
        out.append(f"  {'':<{label}}right  {_shown(self.right, self.digits)}")
        return out


def two_tokens(layer: Layer, options: Mapping[str, Any], sizes: Sizes) -> list[Case]:
    """The layer's plain case with one sequence of two tokens and inputs of one decimal, if it can be so small."""
    if not layer.sizes:
        return []
    tiny = {**TINY, "width": 2 * options["n_head"]} if "n_head" in options else TINY
    near = {size: (sizes.nearest(size, n),) for size, n in tiny.items()}
    found = layer.cases(np.random.default_rng(0), sizes=Sizes(near, only=FIRST), **options)
    return [_rounded(case) for case in found if all(np.size(x) <= LARGEST for x in case.inputs)]


def _rounded(case: Case) -> Case:
    inputs = tuple(np.round(x, 1) + 0.0 if is_float_array(x) else x for x in case.inputs)
    return Case("two tokens", inputs, case.sizes)


def smallest_difference(
    layer: Layer, case: Case, answer: Answer, right: Gradients, wrong: Sequence[str]
) -> Example | None:
    """The first of the wrong gradients that visibly differs in this case."""
    for name in wrong if answer.gradients is not None else ():
        g = layer.gradients.index(name)
        yours = (answer.gradients or [])[g]
        if yours.shape != right[g].shape or not np.isfinite(yours).all():
            continue
        if distance(yours, right[g]) > VISIBLE * max(norm(right[g]), norm(yours)):
            inputs = dict(zip(layer.arguments, case.inputs, strict=False))
            return Example(case.name, name, yours, right[g], inputs)
    return None


def worst_entry(report: LayerReport, options: Mapping[str, Any]) -> Example | None:
    """The entry with the largest error, in the first case that is wrong."""
    for outcome in report.failed:
        for measured in outcome.measured:
            if measured.ok or outcome.answer.gradients is None:
                continue
            g = report.layer.gradients.index(measured.gradient)
            right = report.layer.reference(*outcome.case.inputs, **options)[g]
            yours = outcome.answer.gradients[g]
            error = np.where(np.isfinite(yours), np.abs(yours - right), np.inf)
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
            at = np.asarray(yours[index]), np.asarray(right[index])
            return Example(outcome.case.name, measured.gradient, *at, {}, index)
    return None


def _plain(x: Any) -> Any:
    """An array as nested lists, for JSON; what is not finite becomes None."""
    if isinstance(x, np.ndarray):
        return _plain(x.tolist())
    if isinstance(x, list):
        return [_plain(one) for one in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _shown(x: Any, digits: int = DIGITS) -> str:
    """Numbers with so many digits, without leading axes of one entry."""
    if not isinstance(x, np.ndarray):
        return f"{x:.4g}" if isinstance(x, float) else str(x)
    while x.ndim > 1 and x.shape[0] == 1:
        x = x[0]
    if x.ndim == 0:
        return f"{float(x):.{digits}g}" if x.dtype.kind == "f" else str(x)
    return "[" + ", ".join(_shown(np.asarray(one), digits) for one in x) + "]"
