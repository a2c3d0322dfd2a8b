"""Slips in AdamW: moments, bias corrections, the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.places import at_place
from onfoot.check.slips.made import named


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "clipped_bias" in layer.pieces.names():
        yield from _of_one_parameter(layer)
        yield from _clipped(layer)
        yield from _norms(layer)
    if "second_corrected" in layer.pieces.names():
        yield named(
            layer,
            "√v is divided by 1 − β₂ᵗ, not by its root; or v is corrected twice",
            "v̂ = v/(1 − β₂ᵗ), then √v̂: √v is divided by √(1 − β₂ᵗ)",
            lambda p, case: {
                "second_corrected": lambda v, beta1, beta2, t: p.second_corrected(v, beta1, beta2, t) / (1 - beta2**t)
            },
            "second_corrected",
        )
        yield from _denominators(layer)
    if "second" in layer.pieces.names():
        yield from _of_constants(layer)
        yield from _moments(layer, options["beta2"])


def _of_constants(layer: Layer) -> Iterator[Mistake]:
    m, v = "m = β₁ m + (1 − β₁) g", "v = β₂ v + (1 − β₂) g²"
    wrong: dict[str, tuple[str, str, Piece]] = {
        "the gradient is not squared in the second moment": (
            v,
            "second",
            lambda v, g, beta1, beta2: beta2 * v + (1 - beta2) * g,
        ),
        "the factor 1 − β₁ is missing from the first moment": (m, "first", lambda m, g, beta1: beta1 * m + g),
        "the factor 1 − β₂ is missing from the second moment": (
            v,
            "second",
            lambda v, g, beta1, beta2: beta2 * v + g * g,
        ),
        "β₁ and 1 − β₁ are exchanged in the first moment": (
            m,
            "first",
            lambda m, g, beta1: (1 - beta1) * m + beta1 * g,
        ),
        "β₂ and 1 − β₂ are exchanged in the second moment": (
            v,
            "second",
            lambda v, g, beta1, beta2: (1 - beta2) * v + beta2 * (g * g),
        ),
        "β₁ is used in the second moment": (v, "second", lambda v, g, beta1, beta2: beta1 * v + (1 - beta1) * (g * g)),
        "the second moment is squared as a whole": (
            v,
            "second",
            lambda v, g, beta1, beta2: (beta2 * v + (1 - beta2) * g) ** 2,
        ),
    }
    yield named(
        layer,
        "Nesterov's momentum: the step uses β₁ m + (1 − β₁) g in place of m",
        "m̂ = m/(1 − β₁ᵗ)",
        lambda p, case: {
            "first_corrected": lambda m, beta1, beta2, t: p.first_corrected(
                beta1 * m + (1 - beta1) * case.inputs[1], beta1, beta2, t
            )
        },
        "first_corrected",
    )
    wrong |= {
        "m is multiplied by 1 − β₁ᵗ in place of divided": (
            "m̂ = m/(1 − β₁ᵗ)",
            "first_corrected",
            lambda m, beta1, beta2, t: m * (1 - beta1**t),
        ),
        "v is multiplied by 1 − β₂ᵗ in place of divided": (
            "v̂ = v/(1 − β₂ᵗ)",
            "second_corrected",
            lambda v, beta1, beta2, t: v * (1 - beta2**t),
        ),
        "m is divided by 1 − β₁ in place of 1 − β₁ᵗ": (
            "m̂ = m/(1 − β₁ᵗ)",
            "first_corrected",
            lambda m, beta1, beta2, t: m / (1 - beta1),
        ),
        "v is divided by 1 − β₂ in place of 1 − β₂ᵗ": (
            "v̂ = v/(1 − β₂ᵗ)",
            "second_corrected",
            lambda v, beta1, beta2, t: v / (1 - beta2),
        ),
        "lr · weight_decay is subtracted without the weight": (
            "param ← param (1 − lr · weight_decay)",
            "decayed",
            lambda param, lr, decay: param - lr * decay,
        ),
    }
    for name, (fix, piece, function) in wrong.items():
        yield named(layer, name, fix, lambda p, c, piece=piece, f=function: {piece: f}, piece)


def _moments(layer: Layer, beta2: float) -> Iterator[Mistake]:
    def swapped(case: Case, options: Any) -> Any:
        return case.inputs, {**options, "beta1": options["beta2"], "beta2": options["beta1"]}

    yield named(
        layer,
        "β₁ and β₂ are exchanged",
        "m uses β₁, v uses β₂",
        lambda p, case: {"given": swapped},
        "given",
    )
    yield named(
        layer,
        "β₁ and β₂ are exchanged in the moments m and v",
        "m = β₁ m + (1 − β₁) g, v = β₂ v + (1 − β₂) g²",
        lambda p, case: {
            "first": lambda m, g, beta1: p.first(m, g, beta2),
            "second": lambda v, g, beta1, _: p.second(v, g, beta1, beta1),
        },
        "first",
        "second",
    )
    yield named(
        layer,
        "β₁ and β₂ are exchanged in the bias corrections",
        "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)",
        lambda p, case: {
            "first_corrected": lambda m, beta1, beta2, t: p.first_corrected(m, beta2, beta1, t),
            "second_corrected": lambda v, beta1, beta2, t: p.second_corrected(v, beta2, beta1, t),
        },
        "first_corrected",
        "second_corrected",
    )
    yield named(
        layer,
        "the step uses the moments m and v of before this step",
        "update m and v first, then use them",
        lambda p, case: {
            "first_corrected": lambda m, beta1, beta2, t: p.first_corrected(case.inputs[2], beta1, beta2, t),
            "second_corrected": lambda v, beta1, beta2, t: p.second_corrected(case.inputs[3], beta1, beta2, t),
        },
        "first_corrected",
        "second_corrected",
    )
    yield named(
        layer,
        "the learning rate is in the weight decay twice",
        "param ← param (1 − lr · weight_decay)",
        lambda p, case: {"decayed": lambda param, lr, decay: p.decayed(param, lr, lr * decay)},
        "decayed",
        cost=1.05,
    )
    yield from _steps(layer)
    yield from _stored(layer)
    yield named(
        layer,
        "the bias corrections divide by 1 − β₁ and 1 − β₂, whatever the step",
        "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ)",
        lambda p, case: {
            "first_corrected": lambda m, beta1, beta2, t: m / (1 - beta1),
            "second_corrected": lambda v, beta1, beta2, t: v / (1 - beta2),
        },
        "first_corrected",
        "second_corrected",
    )
    yield named(
        layer,
        "eps is added before the bias correction: √v + eps, divided by √(1 − β₂ᵗ)",
        "√v̂ + eps with v̂ = v/(1 − β₂ᵗ)",
        lambda p, case: {
            "second_corrected": lambda v, beta1, beta2, t: (v, 1 - beta2**t),
            "denominator": lambda v, eps: (np.sqrt(v[0]) + eps) / np.sqrt(v[1]),
        },
        "second_corrected",
        "denominator",
    )


STEPS: dict[str, Callable[[int], int]] = {
    "count the steps from 0: max(t − 1, 1) in place of t": lambda t: max(t - 1, 1),
    "count one step too many: t + 1 in place of t": lambda t: t + 1,
    "count the steps from 0: t − 1 in place of t": lambda t: t - 1,
}


def _steps(layer: Layer) -> Iterator[Mistake]:
    """Another number of steps in the bias corrections: in both of them, or in one."""
    fix = "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ) with t = 1 in the first step"

    def apply(p: Pieces, number: Callable[[int], int], moments: str) -> dict[str, Piece]:
        changed: dict[str, Piece] = {
            "first_corrected": lambda m, beta1, beta2, t: p.first_corrected(m, beta1, beta2, number(t)),
            "second_corrected": lambda v, beta1, beta2, t: p.second_corrected(v, beta1, beta2, number(t)),
        }
        return {name: piece for name, piece in changed.items() if moments in ("both", name)}

    for says, number in STEPS.items():
        for moments, subject in (
            ("both", "the bias corrections"),
            ("first_corrected", "in the bias correction of m,"),
            ("second_corrected", "in the bias correction of v,"),
        ):
            pieces = ("first_corrected", "second_corrected") if moments == "both" else (moments,)
            words = f"{subject} {says}" if moments == "both" else f"{subject} {says.split(': ')[1]}"
            yield named(layer, words, fix, lambda p, case, n=number, m=moments: apply(p, n, m), *pieces)


def _stored(layer: Layer) -> Iterator[Mistake]:
    """m̂ and v̂ are returned as the new m and v."""
    at = layer.arguments.index("step")
    fix = "return m and v themselves; m̂ and v̂ are used in this step only"

    def stored(p: Pieces, case: Case, m: bool, v: bool) -> dict[str, Piece]:
        t = int(case.inputs[at])
        changed: dict[str, Piece] = {}
        if m:
            changed["first"] = lambda m, g, beta1: p.first(m, g, beta1) / (1 - beta1**t)
            changed["first_corrected"] = lambda m, *_: m
        if v:
            changed["second"] = lambda v, g, beta1, beta2: p.second(v, g, beta1, beta2) / (1 - beta2**t)
            changed["second_corrected"] = lambda v, *_: v
        return changed

    for says, m, v in (("m̂ and v̂ are returned as m and v", True, True), ("m̂ is returned as m", True, False)):
        pieces = ("first", "first_corrected", *(("second", "second_corrected") if v else ()))
        yield named(layer, says, fix, lambda p, case, m=m, v=v: stored(p, case, m, v), *pieces)
    yield named(
        layer,
        "v̂ is returned as v",
        fix,
        lambda p, case: stored(p, case, False, True),
        "second",
        "second_corrected",
    )


def _norms(layer: Layer) -> Iterator[Mistake]:
    """Another norm of the gradients for clipping."""
    norms: dict[str, Piece] = {
        "the norms of the arrays are added": lambda a, b: float(np.linalg.norm(a) + np.linalg.norm(b)),
        "the largest norm of an array is used": lambda a, b: float(max(np.linalg.norm(a), np.linalg.norm(b))),
        "the largest entry is used": lambda a, b: float(max(np.abs(a).max(), np.abs(b).max())),
        "the absolute values are added": lambda a, b: float(np.abs(a).sum() + np.abs(b).sum()),
        "the mean of the squares is used": lambda a, b: math.sqrt(
            ((a * a).sum() + (b * b).sum()) / (np.size(a) + np.size(b))
        ),
    }
    for says, norm in norms.items():
        yield named(
            layer,
            f"{says} in place of the norm of all gradients together",
            "norm = √(the sum of the squares of all entries of all arrays)",
            lambda p, case, norm=norm: {"total_norm": norm},
            "total_norm",
        )


def _denominators(layer: Layer) -> Iterator[Mistake]:
    """The correction 1 − β₂ᵗ in the wrong place of the denominator."""

    def changed(p: Pieces, denominator: Piece) -> dict[str, Piece]:
        correction = [1.0]  # of the array at hand

        def second_corrected(v: Array, beta1: float, beta2: float, t: int) -> Array:
            correction[0] = 1 - beta2**t
            return v

        return {
            "second_corrected": second_corrected,
            "denominator": lambda v, eps: denominator(v, correction[0], eps),
        }

    denominators: dict[str, Piece] = {
        "(√v + eps)/(1 − β₂ᵗ) in place of √v̂ + eps: the root of 1 − β₂ᵗ is missing": lambda v, c, eps: (
            (np.sqrt(v) + eps) / c
        ),
        "the update is multiplied by √(1 − β₂ᵗ), though v is corrected already": lambda v, c, eps: (
            (np.sqrt(v / c) + eps) / np.sqrt(c)
        ),
        "the update is multiplied by 1 − β₂ᵗ, though v is corrected already": lambda v, c, eps: (
            (np.sqrt(v / c) + eps) / c
        ),
        "√v is multiplied by √(1 − β₂ᵗ), not divided by it": lambda v, c, eps: np.sqrt(v * c) + eps,
        "the update is divided by √(1 − β₂ᵗ) in place of multiplied by it": lambda v, c, eps: (
            (np.sqrt(v) + eps) * np.sqrt(c)
        ),
    }
    for says, one in denominators.items():
        yield named(
            layer,
            says,
            "param ← param − lr m̂/(√v̂ + eps) with v̂ = v/(1 − β₂ᵗ)",
            lambda p, case, one=one: changed(p, one),
            "second_corrected",
            "denominator",
        )


def _of_one_parameter(layer: Layer) -> Iterator[Mistake]:
    """A counter of steps that advances with every parameter, so that one of the two is a step ahead or behind."""
    fix = "the counter of steps advances once per step, not once per parameter"

    def shifted(p: Pieces, place: int, by: int) -> dict[str, Piece]:
        def moved(right: Piece) -> Piece:
            return at_place(right, lambda a, beta1, beta2, t: right(a, beta1, beta2, t + by), place, 2)

        return {name: moved(getattr(p, name)) for name in ("first_corrected", "second_corrected")}

    for place, which in ((0, "weight"), (1, "bias")):
        for by, number in ((1, "step + 1"), (-1, "step − 1")):
            yield named(
                layer,
                f"the bias corrections of {which} alone use {number}: a counter that advances with every parameter",
                fix,
                lambda p, case, place=place, by=by: shifted(p, place, by),
                "first_corrected",
                "second_corrected",
            )


def _clipped(layer: Layer) -> Iterator[Mistake]:
    """Gradients that are clipped in one of the moments only, or not squared with their factor in the second."""
    fix = "clip the gradients first, then use them in both moments: v = β₂ v + (1 − β₂) (scale g)²"

    def clipped(p: Pieces, first: int, second: int) -> dict[str, Piece]:
        """Powers of the factor of clipping in m and in v."""
        scale = [1.0]

        def clip(norm: float, max_norm: float) -> float:
            scale[0] = p.clip(norm, max_norm)
            return 1.0

        return {
            "clip": clip,
            "first": lambda m, g, beta1: p.first(m, g * scale[0] ** first, beta1),
            "second": lambda v, g, beta1, beta2: p.second(v, g * scale[0] ** (second / 2), beta1, beta2),
        }

    for says, first, second in (
        ("the factor of clipping is not squared in the second moments: scale · g² in place of (scale · g)²", 1, 1),
        ("the first moments use the gradients before clipping", 0, 2),
        ("the second moments use the gradients before clipping", 1, 0),
    ):
        powers = first, second
        yield named(layer, says, fix, lambda p, case, powers=powers: clipped(p, *powers), "clip", "first", "second")
