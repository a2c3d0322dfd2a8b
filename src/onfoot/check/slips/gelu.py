"""Slips in GELU: its constants and the derivative of its tanh form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import fitted, named
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI

CUT_OFF = (0.7978845608, 0.79788456)  # √(2/π) as it is often written


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "density" in layer.pieces.names() and {**layer.assumes, **options}.get("form") == "tanh":
        yield from _tanh_constants(layer)
        yield from _slips(layer)
    if "density" in layer.pieces.names():
        yield from _at_output(layer)


def _at_output(layer: Layer) -> Iterator[Mistake]:
    """The derivative at the wrong place."""

    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        def at(x: Array, form: str) -> Array:
            found: Array = x * p.cumulative(x, form)
            return found

        form = {**layer.assumes, **layer.options}.get("form", "tanh")
        return {
            "cumulative": lambda x, form: p.cumulative(at(x, form), form),
            "density": lambda x, form: p.density(at(x, form), form),
            "slope": lambda x, cumulative, density: p.slope(at(x, form), cumulative, density),
        }

    yield named(
        layer,
        "the derivative of GELU is taken at its output gelu(x), not at x",
        "save x, the input of GELU, and take the derivative there",
        apply,
        "cumulative",
        "density",
        "slope",
    )


def _tanh_of(x: Array, root: float, cubic: float) -> Array:
    return np.tanh(root * (x + cubic * x**3))


def cumulative(root: float, cubic: float) -> Piece:
    return lambda x, form: 0.5 * (1 + _tanh_of(x, root, cubic))


def density(root: float, cubic: float, outer: float | None = None, inner: float | None = None) -> Piece:
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
        lambda p, c: {"cumulative": cumulative(ROOT_2_OVER_PI, c), "density": density(ROOT_2_OVER_PI, c)},
        correct=CUBIC,
    )
    yield fitted(
        layer,
        "another constant in place of √(2/π)",
        "constant",
        roots,
        fix,
        lambda p, c: {"cumulative": cumulative(c, CUBIC), "density": density(c, CUBIC)},
        correct=ROOT_2_OVER_PI,
    )
    yield fitted(
        layer,
        "another constant in place of √(2/π), in the derivative of u",
        "constant",
        (1.0, *roots),
        fix,
        lambda p, c: {"density": density(ROOT_2_OVER_PI, CUBIC, outer=c)},
        1.26,
        ROOT_2_OVER_PI,
    )
    yield fitted(
        layer,
        "another constant in place of 0.044715, in the derivative of u",
        "constant",
        (0.0, *cubics, CUBIC / 3, 2 * CUBIC / 3),
        fix,
        lambda p, c: {"density": density(ROOT_2_OVER_PI, CUBIC, inner=c)},
        1.26,
        CUBIC,
    )


def _slips(layer: Layer) -> Iterator[Mistake]:
    """Slips in the derivative of the tanh form, also with √(2/π) cut off after some digits."""
    for r in (ROOT_2_OVER_PI, *CUT_OFF):
        yield from _with_root(layer, r)


def _with_root(layer: Layer, r: float) -> Iterator[Mistake]:
    c, exact = CUBIC, r == ROOT_2_OVER_PI
    forward: dict[str, Piece] = {} if exact else {"cumulative": cumulative(r, c)}
    sech: Callable[[Array], Array] = lambda x: 0.5 * (1 - _tanh_of(x, r, c) ** 2)  # noqa: E731
    inner: Callable[[Array], Array] = lambda x: r * (1 + 3 * c * x * x)  # noqa: E731
    slips: dict[str, Callable[[Array], Array]] = {
        "1 + tanh² u in place of 1 − tanh² u": lambda x: 0.5 * (1 + _tanh_of(x, r, c) ** 2) * inner(x),
        "tanh² u in place of 1 − tanh² u": lambda x: 0.5 * _tanh_of(x, r, c) ** 2 * inner(x),
        "1 − |tanh u| in place of 1 − tanh² u": lambda x: 0.5 * (1 - np.abs(_tanh_of(x, r, c))) * inner(x),
        "√(1 − tanh² u) in place of 1 − tanh² u": lambda x: 0.5 * np.sqrt(1 - _tanh_of(x, r, c) ** 2) * inner(x),
        "1/cosh u in place of 1/cosh² u = 1 − tanh² u": lambda x: 0.5 / np.cosh(r * (x + c * x**3)) * inner(x),
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
            f"{name}, in the derivative of tanh u{'' if exact else f' (with √(2/π) written as {r})'}",
            "½ (1 − tanh² u) u' with u' = √(2/π)(1 + 3 · 0.044715 x²)",
            lambda p, case, slip=slip: {**forward, "density": lambda x, form: slip(x)},
            "density",
            *forward,
        )
