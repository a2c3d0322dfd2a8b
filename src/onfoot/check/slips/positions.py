"""Slips in rotary positions: angles, frequencies, the terms of the rotation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import COST, fitted, named


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "frequencies" in layer.pieces.names():
        yield from _angles(layer)
    if "rotate_back" in layer.pieces.names():
        yield from _rotations(layer)
    if "dk_below" in layer.pieces.names():
        yield from _other_positions(layer)
    if "rotated_back" in layer.pieces.names():
        yield from _unrotated_parameters(layer)


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
    yield from _layouts(layer)
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


def _layouts(layer: Layer) -> Iterator[Mistake]:
    """The angles of one layout with the pairs of the other, and angles in integers."""
    fix = "feature i is paired with feature i + D/2, and both have angle i: np.concatenate([angles, angles], axis=-1)"

    def halves(dy: Array, angles: Array) -> Array:
        first, second = np.split(dy, 2, axis=-1)
        turned = np.concatenate([second, -first], axis=-1)
        both = np.repeat(angles, 2, axis=-1)
        return dy * np.cos(both) + turned * np.sin(both)

    def halves_first(dy: Array, angles: Array) -> Array:
        """The sines are multiplied before the halves are exchanged."""
        both = np.repeat(angles, 2, axis=-1)
        first, second = np.split(dy * np.sin(both), 2, axis=-1)
        return dy * np.cos(both) + np.concatenate([second, -first], axis=-1)

    def adjacent(dy: Array, angles: Array) -> Array:
        turned = np.empty_like(dy)
        turned[..., 0::2], turned[..., 1::2] = dy[..., 1::2], -dy[..., 0::2]
        both = np.concatenate([angles, angles], axis=-1)
        return dy * np.cos(both) + turned * np.sin(both)

    wrong = {
        "the angles are repeated one by one (0 0 1 1 …), but the pairs are halves": halves,
        "the angles are repeated one by one (0 0 1 1 …), and multiplied before the halves are exchanged": halves_first,
        "the angles are repeated as halves (0 1 … 0 1 …), but the pairs are adjacent": adjacent,
    }
    for says, rotate in wrong.items():
        yield named(layer, says, fix, lambda p, case, f=rotate: {"rotate_back": f}, "rotate_back")
    exact = "angle = position · theta^(−2i/D) in floating point; integers and // cut it off"
    rounded: dict[str, Callable[[Array, Array], Array]] = {
        "the angles are cut off to integers": lambda t, f: np.trunc(t[:, None] * f),
        "positions // powers: the angles are rounded down": lambda t, f: t[:, None] // (1 / f),
        "positions // powers, both in integers": lambda t, f: t[:, None] // np.trunc(1 / f),
        "the powers theta^(2i/D) are cut off to integers": lambda t, f: t[:, None] / np.trunc(1 / f),
        "the powers theta^(2i/D) are rounded to integers": lambda t, f: t[:, None] / np.round(1 / f),
        "the frequencies are cut off to integers": lambda t, f: t[:, None] * np.trunc(f),
    }
    for says, angles in rounded.items():
        yield named(layer, says, exact, lambda p, case, f=angles: {"angles": f}, "angles")


def _other_positions(layer: Layer) -> Iterator[Mistake]:
    """Each term of dk is rotated back by the position of its query, or each of dq by that of its key.

    Rotating a query back by its own position undoes its rotation, so that the products have q and k as they are given.
    """
    fix = "rotate dq back by the query's position and dk by the key's own, after the sum over the other one"

    def unrotated(p: Pieces, case: Case, of: str) -> dict[str, Piece]:
        q, k = case.inputs[:2]
        if of == "dk":
            return {"dk": lambda draw, *_: p.dk(draw, q, k), "dk_below": lambda dk, rotated_back: dk}
        return {"dq": lambda draw, *_: p.dq(draw, k, q), "dq_below": lambda dq, rotated_back: dq}

    for of, whose, own in (("dk", "queries", "keys"), ("dq", "keys", "queries")):
        yield named(
            layer,
            f"{of} is rotated back by the positions of the {whose}, not of the {own}",
            fix,
            lambda p, case, of=of: unrotated(p, case, of),
            of,
            f"{of}_below",
            cost=1.1,
        )


def _unrotated_parameters(layer: Layer) -> Iterator[Mistake]:
    """dq and dk are rotated back for the input's gradient, but not for those of the parameters."""

    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        before: list[Array] = []  # dq and dk as they were before they were rotated back
        count = itertools.count()

        def rotated_back(dy: Array, angle: Array) -> Array:
            before.append(dy)
            found: Array = p.rotated_back(dy, angle)
            return found

        def at_projection(dy: Array, weight: Array) -> Array:
            place = next(count) % 3
            found: Array = p.at_projection(dy if place == 2 else before[len(before) - 2 + place], weight)
            return found

        return {"rotated_back": rotated_back, "at_projection": at_projection}

    yield named(
        layer,
        "the gradients of w_q, b_q, w_k and b_k use dq and dk before they are rotated back",
        "rotate dq and dk back first; then compute the gradients of the input and of the parameters from them",
        apply,
        "rotated_back",
        "at_projection",
        cost=1.0,
    )
