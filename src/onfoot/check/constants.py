"""Fitted constants: formulas that are right with another number, such as “right with eps = 1e-12”.

Each is a `Mistake` with an unknown number, which is fitted to what the function returned; it explains the result only
if the fit leaves rounding error. A constant that depends on the case, such as √d_v in place of √d_k, is tried by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.arrays import erf
from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces, transposed
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI
from onfoot.ops.cross_entropy import IGNORE

EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-9, 1e-10, 1e-4, 1e-3, 1e-2, 0.1, 0.0)
STARTS: dict[str, tuple[float, ...]] = {
    "eps": EPS,
    "theta": (500000.0, 1e6, 1e5, 1e3, 100.0, 10.0, 5e4),
    "lr": (1e-3, 1e-4, 0.1, 1.0, 0.02, 5e-3),
    "beta1": (0.8, 0.95, 0.99, 0.5, 0.1, 0.0),
    "beta2": (0.999, 0.99, 0.98, 0.9, 0.05, 0.5),
    "weight_decay": (0.01, 0.0, 0.05, 0.001, 0.2, 1.0),
}
COST = 1.15


def constants(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    """The mistakes of a layer that are another constant."""
    names = layer.pieces.names()
    for name in layer.options:
        if name in STARTS:
            yield _option(layer, name, options.get(name, layer.options[name]))
    if "eps" not in layer.options and "rstd" in names:
        yield fitted(layer, "right with another eps", "eps", EPS, "use the eps of the contract", _eps)
    if "frequencies" in names:
        yield from _angles(layer)
    if "scores" in names:
        yield from _scales(layer)
    if "density" in names and {**layer.assumes, **options}.get("form") == "tanh":
        yield from _tanh_constants(layer)
        yield from _slips(layer)
    if "slope" in names:
        yield from _activations(layer)
    if "silu_slope" in names:
        yield from _gates(layer)
    if "y_gt" in names:
        yield from _losses(layer)
    if "rotate_back" in names:
        yield from _rotations(layer)
    if "second" in names:
        yield from _moments(layer)


def fitted(
    layer: Layer,
    name: str,
    parameter: str,
    starts: tuple[float, ...],
    fix: str,
    apply: Callable[..., dict[str, Piece]],
    cost: float = COST,
) -> Mistake:
    """A mistake with an unknown number."""
    replaces = frozenset(apply(layer.pieces, starts[0]))
    return Mistake(
        name, layer.name, "", "", fix, apply, parameter=parameter, starts=starts, cost=cost, replaces=replaces
    )


def named(
    layer: Layer, name: str, fix: str, apply: Callable[..., dict[str, Piece]], *replaces: str, cost: float = COST
) -> Mistake:
    """A mistake whose constant depends on the case."""
    return Mistake(name, layer.name, "", "", fix, apply, per_case=True, cost=cost, replaces=frozenset(replaces))


def _option(layer: Layer, name: str, wanted: float) -> Mistake:
    """Another value of an option than the one that was asked for."""
    usual = layer.options[name]

    def apply(p: Pieces, value: float) -> dict[str, Piece]:
        number = value if value >= 0 else math.nan  # a negative one explains nothing
        return {"given": lambda case, options: (case.inputs, {**options, name: number})}

    fix = f"use the {name} of the contract, {wanted:g}; or check with --{name.replace('_', '-')} if yours is intended"
    starts = STARTS[name] if wanted == usual else (usual, *STARTS[name])
    return fitted(layer, f"right with another {name}", name, starts, fix, apply)


def _eps(p: Pieces, value: float) -> dict[str, Piece]:
    return {"rstd": lambda variance, eps: p.rstd(variance, value)}


# positions


def _angles(layer: Layer) -> Iterator[Mistake]:
    fix = "angle = position · theta^(−2i/D), in radians"
    yield fitted(
        layer,
        "the angles are multiplied by a number",
        "angle times",
        (2.0, 0.5, -1.0, 180 / math.pi, math.pi / 180, 2 * math.pi),
        fix,
        lambda p, value: {"angles": lambda positions, frequencies: value * p.angles(positions, frequencies)},
    )
    yield fitted(
        layer,
        "the positions are shifted",
        "added to every position",
        (-1.0, 2.0),
        "use the given positions",
        lambda p, value: {"angles": lambda positions, frequencies: p.angles(positions + value, frequencies)},
    )


TERMS = (
    ("first · cos", "the first half"),
    ("second · sin", "the first half"),
    ("second · cos", "the second half"),
    ("first · sin", "the second half"),
)
RIGHT_SIGNS = (1, 1, 1, -1)
HOW = {0: "is missing", -1: "has the wrong sign", 2: "is counted twice"}


def _rotations(layer: Layer) -> Iterator[Mistake]:
    """One or two of the four terms of the rotation wrong, or sin and cos exchanged."""
    fix = "first · cos + second · sin, second · cos − first · sin"

    def piece(signs: tuple[int, ...], swap: bool = False) -> Piece:
        def rotate(dy: Array, angles: Array) -> Array:
            first, second = np.split(dy, 2, axis=-1)
            cos, sin = (np.sin(angles), np.cos(angles)) if swap else (np.cos(angles), np.sin(angles))
            one = signs[0] * first * cos + signs[1] * second * sin
            return np.concatenate([one, signs[2] * second * cos + signs[3] * first * sin], axis=-1)

        return rotate

    exponents: dict[str, Callable[[int], Array]] = {
        "the frequencies counted from i = 1": lambda width: (np.arange(width // 2) + 1) / (width // 2),
        "the frequencies divided by D/2 − 1 in place of D/2": lambda width: (
            np.arange(width // 2) / max(width // 2 - 1, 1)
        ),
        "the frequencies θ^(−4i/D)": lambda width: 2 * np.arange(width // 2) / (width // 2),
        "the frequencies of D − 2": lambda width: 2 * np.arange(width // 2) / max(width - 2, 1),
    }
    for says, exponent in exponents.items():
        yield named(
            layer,
            says,
            "frequency i = theta^(−2i/D), i = 0 … D/2 − 1",
            lambda p, case, e=exponent: {"frequencies": lambda width, theta: theta ** -e(width)},
            "frequencies",
        )
    yield named(
        layer, "sin and cos are exchanged", fix, lambda p, c: {"rotate_back": piece(RIGHT_SIGNS, True)}, "rotate_back"
    )
    for factors in itertools.product((1, -1, 0, 2), repeat=4):
        off = [i for i, factor in enumerate(factors) if factor != 1]
        if 1 <= len(off) <= 2:
            says = " and ".join(f"the term {TERMS[i][0]} of {TERMS[i][1]} {HOW[factors[i]]}" for i in off)
            signs = tuple(a * b for a, b in zip(factors, RIGHT_SIGNS, strict=True))
            made = named(layer, says, fix, lambda p, c, s=signs: {"rotate_back": piece(s)}, "rotate_back")
            yield replace(made, cost=COST + 0.1 * (len(off) - 1))


# AdamW


def _moments(layer: Layer) -> Iterator[Mistake]:
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


# attention


def _scales(layer: Layer) -> Iterator[Mistake]:
    """Another scale of the scores: in both passes, in the forward pass alone, or in the backward pass alone."""
    fix = "divide the scores and their gradient by √d_k, the width of one head's q and k"

    def both(p: Pieces, value: float) -> dict[str, Piece]:
        return {
            "scores": lambda q, k: value * (q @ transposed(k)),
            "draw": lambda dscores, q: value * dscores,
        }

    starts = (1.0, 0.125, 0.5, 0.25, 0.1, 0.2, 1 / 16)
    name = "the scores are multiplied by a constant in place of 1/√d_k"
    yield fitted(layer, name, "constant", starts, fix, both)
    yield fitted(
        layer,
        "the scores are multiplied by a further constant (a temperature)",
        "constant",
        (0.5, 2.0, 0.9, 1.1, math.log(2), 1.4427),
        fix,
        lambda p, value: {
            "scores": lambda q, k: value * p.scores(q, k),
            "draw": lambda dscores, q: value * p.draw(dscores, q),
        },
        1.26,
    )
    yield named(
        layer,
        "the weights are exp(scores), not divided by their sum",
        "divide exp(scores) by its sum over the keys",
        lambda p, case: {"weights": _exponentials},
        "weights",
    )
    for says, masked in (("", False), (", their gradient masked", True)):
        yield fitted(
            layer,
            f"masked scores get a finite value in place of −∞{says}",
            "value",
            (-1.0, 1.0, -10.0, -100.0, 1e-9),
            "np.where(mask, scores, -inf) before softmax",
            lambda p, value, masked=masked: _filled(p, value, masked),
        )
    for quantity in ("d_v", "d_model", "H·d_k", "n", "H", "B", "d"):
        for root in (True, False):
            yield from _scale_by(layer, quantity, root, fix)


def _filled(p: Pieces, value: float, masked: bool) -> dict[str, Piece]:
    """Masked scores get a finite value; their gradient is set to 0 if `masked`."""
    changed: dict[str, Piece] = {
        "weights": lambda scores, mask: p.weights(scores if mask is None else np.where(mask, scores, value), None)
    }
    if masked:
        changed["dscores"] = lambda drho, rho, dots, scores, mask: (
            p.dscores(drho, rho, dots, scores, mask) * (1 if mask is None else mask)
        )
    return changed


def _exponentials(scores: Array, mask: Array | None) -> Array:
    seen = scores if mask is None else np.where(mask, scores, -math.inf)
    return np.exp(seen - seen.max(axis=-1, keepdims=True))


def sized(case: Case, quantity: str) -> float:
    """A size of the case, or nan if it has none of that name."""
    if quantity == "H·d_k":
        return case.sizes.get("H", math.nan) * case.sizes.get("d_k", math.nan)
    return case.sizes.get(quantity, math.nan)


def _scale_by(layer: Layer, quantity: str, root: bool, fix: str) -> Iterator[Mistake]:
    shown = f"√({quantity})" if root and "·" in quantity else f"√{quantity}" if root else quantity
    if quantity == "H·d_k":
        shown += " (d_model)"

    def scale(case: Case) -> float:
        return 1 / (math.sqrt(sized(case, quantity)) if root else sized(case, quantity))

    def scores(case: Case) -> Piece:
        return lambda q, k: scale(case) * (q @ transposed(k))

    def draw(case: Case) -> Piece:
        return lambda dscores, q: scale(case) * dscores

    says = f"{shown} in place of √d_k"
    yield named(
        layer, f"{says}, in both passes", fix, lambda p, c: {"scores": scores(c), "draw": draw(c)}, "scores", "draw"
    )
    yield named(layer, f"{says}, in the forward pass", fix, lambda p, c: {"scores": scores(c)}, "scores")
    yield named(layer, f"{says}, in the backward pass", fix, lambda p, c: {"draw": draw(c)}, "draw")


# activations


def _tanh_of(x: Array, root: float, cubic: float) -> Array:
    return np.tanh(root * (x + cubic * x**3))


def _cumulative(root: float, cubic: float) -> Piece:
    return lambda x, form: 0.5 * (1 + _tanh_of(x, root, cubic))


def _density(root: float, cubic: float, outer: float | None = None, inner: float | None = None) -> Piece:
    """φ of the tanh form; `outer` and `inner` are the constants of u' if they differ from those of u."""
    a, b = root if outer is None else outer, cubic if inner is None else inner
    return lambda x, form: 0.5 * (1 - _tanh_of(x, root, cubic) ** 2) * a * (1 + 3 * b * x * x)


def _tanh_constants(layer: Layer) -> Iterator[Mistake]:
    fix = "u = √(2/π)(x + 0.044715 x³) with √(2/π) = 0.7978845608028654; write math.sqrt(2 / math.pi)"
    roots, cubics = (0.7978845608, 0.79788, 0.798, 0.8, 2 / math.pi), (CUBIC, 0.0447, 0.045, 0.044, 0.04)
    yield fitted(
        layer,
        "another constant in place of 0.044715",
        "constant",
        cubics,
        fix,
        lambda p, c: {"cumulative": _cumulative(ROOT_2_OVER_PI, c), "density": _density(ROOT_2_OVER_PI, c)},
    )
    yield fitted(
        layer,
        "another constant in place of √(2/π)",
        "constant",
        roots,
        fix,
        lambda p, c: {"cumulative": _cumulative(c, CUBIC), "density": _density(c, CUBIC)},
    )
    yield fitted(
        layer,
        "another constant in place of √(2/π), in the derivative of u",
        "constant",
        (1.0, *roots),
        fix,
        lambda p, c: {"density": _density(ROOT_2_OVER_PI, CUBIC, outer=c)},
        1.26,
    )
    yield fitted(
        layer,
        "another constant in place of 0.044715, in the derivative of u",
        "constant",
        (0.0, *cubics, CUBIC / 3, 2 * CUBIC / 3),
        fix,
        lambda p, c: {"density": _density(ROOT_2_OVER_PI, CUBIC, inner=c)},
        1.26,
    )


def _slips(layer: Layer) -> Iterator[Mistake]:
    """Slips in the derivative of the tanh form."""
    r, c = ROOT_2_OVER_PI, CUBIC
    sech: Callable[[Array], Array] = lambda x: 0.5 * (1 - _tanh_of(x, r, c) ** 2)  # noqa: E731
    inner: Callable[[Array], Array] = lambda x: r * (1 + 3 * c * x * x)  # noqa: E731
    slips: dict[str, Callable[[Array], Array]] = {
        "1 + tanh² u in place of 1 − tanh² u": lambda x: 0.5 * (1 + _tanh_of(x, r, c) ** 2) * inner(x),
        "tanh² u in place of 1 − tanh² u": lambda x: 0.5 * _tanh_of(x, r, c) ** 2 * inner(x),
        "(1 − tanh u)² in place of 1 − tanh² u": lambda x: 0.5 * (1 - _tanh_of(x, r, c)) ** 2 * inner(x),
        "u' = √(2/π)(1 + 3 · 0.044715 x): x in place of x²": lambda x: sech(x) * r * (1 + 3 * c * x),
        "u' = √(2/π)(1 + 3 · 0.044715 x³): x³ in place of x²": lambda x: sech(x) * r * (1 + 3 * c * x**3),
        "u' = √(2/π)(1 + 2 · 0.044715 x²): 2 in place of 3": lambda x: sech(x) * r * (1 + 2 * c * x * x),
        "u' = √(2/π)(x + 3 · 0.044715 x²): x in place of 1": lambda x: sech(x) * r * (x + 3 * c * x * x),
        "u' = √(2/π)(x + 0.044715 x³): u in place of its derivative": lambda x: sech(x) * r * (x + c * x**3),
        "u' = √(2/π) · 3 · 0.044715 x²: the term 1 is missing": lambda x: sech(x) * r * 3 * c * x * x,
        "u' without √(2/π)": lambda x: sech(x) * (1 + 3 * c * x * x),
    }
    for name, slip in slips.items():
        yield named(
            layer,
            f"{name}, in the derivative of tanh u",
            "½ (1 − tanh² u) u' with u' = √(2/π)(1 + 3 · 0.044715 x²)",
            lambda p, case, slip=slip: {"density": lambda x, form: slip(x)},
            "density",
        )


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _normal(x: Array) -> Array:
    return 0.5 * (1 + erf(x / math.sqrt(2)))


def _normal_density(x: Array) -> Array:
    return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


# activation: its derivative; and the function itself, for a gate
SLOPES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "ReLU": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "SiLU": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "the sigmoid": (_sigmoid, lambda x: _sigmoid(x) * (1 - _sigmoid(x))),
    "GELU (erf)": (lambda x: x * _normal(x), lambda x: _normal(x) + x * _normal_density(x)),
    "GELU (tanh)": (
        lambda x: x * _cumulative(ROOT_2_OVER_PI, CUBIC)(x, ""),
        lambda x: _cumulative(ROOT_2_OVER_PI, CUBIC)(x, "") + x * _density(ROOT_2_OVER_PI, CUBIC)(x, ""),
    ),
    "the identity": (lambda x: x, lambda x: 0 * x + 1.0),
}


def _activations(layer: Layer) -> Iterator[Mistake]:
    for name, (_, slope) in SLOPES.items():
        if "GELU" not in name:
            yield named(
                layer,
                f"the derivative of {name} in place of GELU's",
                "dx = dout ∘ gelu'(x)",
                lambda p, case, slope=slope: {"slope": lambda x, cumulative, density: slope(x)},
                "slope",
            )
    yield fitted(
        layer,
        "the derivative of x σ(c x)",
        "c",
        (1.702, 1.0, 1.6),
        "use the derivative of the same form as the forward pass",
        lambda p, c: {
            "cumulative": lambda x, form: _sigmoid(c * x),
            "density": lambda x, form: c * _sigmoid(c * x) * (1 - _sigmoid(c * x)),
        },
    )


def _gates(layer: Layer) -> Iterator[Mistake]:
    fix = "silu(x) = x σ(x) with σ(x) = 1/(1 + e⁻ˣ)"
    for name, (value, slope) in SLOPES.items():
        if name != "SiLU":
            yield named(
                layer,
                f"{name} in place of SiLU",
                fix,
                lambda p, case, value=value, slope=slope: {
                    "silu": lambda gate, s: value(gate),
                    "silu_slope": lambda gate, s: slope(gate),
                },
                "silu",
                "silu_slope",
            )
    slips: dict[str, Callable[[Array, Array], Array]] = {
        "σ (1 + x)(1 − σ)": lambda x, s: s * (1 + x) * (1 - s),
        "σ (1 + x σ (1 − σ))": lambda x, s: s * (1 + x * s * (1 - s)),
        "σ + x (1 − σ)": lambda x, s: s + x * (1 - s),
        "σ + (1 − σ)": lambda x, s: s + (1 - s),
        "σ (1 + x − σ)": lambda x, s: s * (1 + x - s),
        "σ + σ (1 − σ)": lambda x, s: s + s * (1 - s),
        "σ − x σ (1 − σ)": lambda x, s: s - x * s * (1 - s),
    }
    for name, slip in slips.items():
        yield named(
            layer,
            f"silu' as {name}",
            "silu'(x) = σ(x) (1 + x (1 − σ(x)))",
            lambda p, case, slip=slip: {"silu_slope": slip},
            "silu_slope",
        )
    for where, inner in (("", True), (", without the inner derivative", False)):
        yield fitted(
            layer,
            f"σ(c x) in place of σ(x){where}",
            "c",
            (1.702, 0.5, 2.0, -1.0),
            fix,
            lambda p, c, inner=inner: {
                "sigmoid": lambda gate: _sigmoid(c * gate),
                "silu_slope": lambda gate, s: s + (c if inner else 1.0) * gate * s * (1 - s),
            },
        )


# losses


def _losses(layer: Layer) -> Iterator[Mistake]:
    fix = "the targets are one-hot: 1 at the target, 0 elsewhere"
    yield fitted(
        layer,
        "smoothed targets",
        "label smoothing",
        (0.1, 0.05, 0.2),
        fix,
        lambda p, s: {"y_gt": lambda targets, n: (1 - s) * p.y_gt(targets, n) + s / n * _has_target(p, targets, n)},
    )
    yield fitted(
        layer,
        "smoothed targets, over the other ids",
        "label smoothing",
        (0.1, 0.05, 0.2),
        fix,
        lambda p, s: {
            "y_gt": lambda targets, n: (
                (1 - s - s / (n - 1)) * p.y_gt(targets, n) + s / (n - 1) * _has_target(p, targets, n)
            )
        },
    )
    for where, power in ((", in both passes", 1), (", in the forward pass", 0)):
        yield fitted(
            layer,
            f"the logits are multiplied by a number (1/temperature){where}",
            "number",
            (0.5, 2.0, 0.7, 0.9, 0.1),
            "softmax of the logits as they are",
            lambda p, c, power=power: {
                "lse": lambda logits: p.lse(c * logits),
                "y_pred": lambda logits, lse: p.y_pred(c * logits, lse),
                "divided": lambda delta, divisor, dloss: c**power * p.divided(delta, divisor, dloss),
            },
        )
    yield named(
        layer,
        "y_pred is exp(logits), not divided by its sum",
        "divide exp(logits) by its sum over the vocabulary",
        lambda p, case: {"y_pred": lambda logits, lse: np.exp(logits - logits.max(axis=-1, keepdims=True))},
        "y_pred",
        cost=1.201,
    )
    count = "the number of targets"
    for quantity in ("V", "n", "B", "B·n", "n − 1"):
        made = named(
            layer,
            f"divided by {quantity} in place of {count}",
            f"divide by {count}",
            lambda p, case, q=quantity: {"divisor": lambda targets, n_vocab: case.sizes[q]},
            "divisor",
        )
        yield made
    yield named(
        layer,
        f"multiplied by {count} in place of divided",
        f"divide by {count}",
        lambda p, case: {"divisor": lambda targets, n_vocab: 1 / p.divisor(targets, n_vocab)},
        "divisor",
    )
    for pad in (0, -1):
        shown = "0" if pad == 0 else "the last id"
        ignored = f"targets of {shown} are ignored as padding"
        yield named(
            layer,
            ignored,
            f"only targets of {IGNORE} are ignored",
            lambda p, case, pad=pad: _ignoring(p, case, pad, True),
            "counted",
            "divisor",
        )
        yield named(
            layer,
            f"{ignored}, but counted in the divisor",
            f"only targets of {IGNORE} are ignored",
            lambda p, case, pad=pad: _ignoring(p, case, pad, False),
            "counted",
        )


def _has_target(p: Pieces, targets: Array, n: int) -> Array:
    return (targets != IGNORE)[..., None] * 1.0


def _ignoring(p: Pieces, case: Case, pad: int, divide: bool) -> dict[str, Piece]:
    ignored = pad if pad >= 0 else case.inputs[0].shape[-1] - 1
    changed: dict[str, Piece] = {
        "counted": lambda delta, targets: p.counted(np.where((targets == ignored)[..., None], 0, delta), targets)
    }
    if divide:
        changed["divisor"] = lambda targets, n_vocab: max(int(((targets != IGNORE) & (targets != ignored)).sum()), 1)
    return changed
