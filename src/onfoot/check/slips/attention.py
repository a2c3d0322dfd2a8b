"""Slips in attention: another scale, another value of masked scores, weights without the mask, packed heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces, transposed
from onfoot.check.slips.made import factor, fitted, named, small

PARTS = ("dq", "dk", "dv")


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "scores" in layer.pieces.names():
        yield from _scales(layer)
    if "side_by_side" in layer.pieces.names():
        yield from _packed(layer)
    if "row_dots" in layer.pieces.names():
        yield from _softmax(layer)
        yield from _sums(layer)
    if "mask" in layer.pieces.names():
        yield from _windows(layer)


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
            "scores": lambda q, k: factor(value) * p.scores(q, k),
            "draw": lambda dscores, q: factor(value) * p.draw(dscores, q),
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
    for quantity in ("d_v", "d_model", "H·d_k", "n", "m", "H", "B", "d", "G", "H_kv"):
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


def _packed(layer: Layer) -> Iterator[Mistake]:
    def interleaved(case: Case) -> Piece:
        heads = int(case.sizes["H"])

        def piece(dq: Array, dk: Array, dv: Array, *_: int) -> Array:
            parts = [x.reshape(*x.shape[:-1], heads, -1) for x in (dq, dk, dv)]
            return np.stack(parts, axis=-2).reshape(*dq.shape[:-1], -1)

        return piece

    for order in itertools.permutations(range(3)):
        if order != (0, 1, 2):
            yield named(
                layer,
                f"{', '.join(PARTS[i] for i in order)} are concatenated in this order",
                "concatenate dq | dk | dv, in the order in which the forward pass splits q | k | v",
                lambda p, case, order=order: {
                    "side_by_side": lambda *parts: p.side_by_side(*(parts[i] for i in order), *parts[3:])
                },
                "side_by_side",
            )
    yield named(
        layer,
        "dq, dk and dv are put together head by head, not one after the other",
        "concatenate dq | dk | dv, each with all its heads, as the forward pass splits them",
        lambda p, case: {"side_by_side": interleaved(case)},
        "side_by_side",
    )


def _softmax(layer: Layer) -> Iterator[Mistake]:
    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        return {
            "weights": lambda scores, mask: p.weights(scores, None),
            "dscores": lambda drho, rho, dots, scores, mask: (
                p.dscores(drho, rho, dots, scores, mask) * (1 if mask is None else mask)
            ),
        }

    yield named(
        layer,
        "the weights are computed without the mask; only the gradient of the scores is masked",
        "np.where(mask, scores, -inf) before softmax, also where the weights are computed again",
        apply,
        "weights",
        "dscores",
    )


def _sums(layer: Layer) -> Iterator[Mistake]:
    """A sum of exponentials that overflows, or that something is added to."""

    def overflowing(scores: Array, mask: Array | None) -> Array:
        seen = scores if mask is None else np.where(mask, scores, -math.inf)
        return np.exp(seen - np.log(np.exp(seen).sum(axis=-1, keepdims=True)))

    def with_eps(p: Pieces, value: float) -> dict[str, Piece]:
        def weights(scores: Array, mask: Array | None) -> Array:
            e = _exponentials(scores, mask)
            return e / (e.sum(axis=-1, keepdims=True) + small(value))

        return {"weights": weights}

    yield named(
        layer,
        "log Σ exp(scores) without subtracting the maximum: it overflows, and the weights become 0",
        "subtract the largest score of each row before exp, and add it to the logarithm",
        lambda p, case: {"weights": overflowing},
        "weights",
    )
    for words, axis in (("queries", (-2,)), ("queries and keys", (-2, -1))):
        yield named(
            layer,
            f"exp(scores) is divided by its sum over the {words}, not over the keys alone",
            "divide exp(scores) by its sum over the keys, the last axis",
            lambda p, case, axis=axis: {"weights": _divided(axis)},
            "weights",
        )
    yield fitted(
        layer,
        "a number is added to the sum of the exponentials",
        "added",
        (1e-9, 1e-8, 1e-12, 1e-6, 1e-5, 1e-10),
        "divide exp(scores − max) by its sum alone, which is at least 1",
        with_eps,
    )


def _divided(axis: tuple[int, ...]) -> Piece:
    def weights(scores: Array, mask: Array | None) -> Array:
        e = _exponentials(scores, mask)
        return e / e.sum(axis=axis, keepdims=True)

    return weights


def _windows(layer: Layer) -> Iterator[Mistake]:
    """A mask that ends a number of keys before the query."""

    def windowed(p: Pieces, k: int) -> Piece:
        def mask(n_q: int, n_k: int, causal: bool) -> Array:
            near = np.arange(n_q)[:, None] + n_k - n_q - np.arange(n_k) < k
            seen = p.mask(n_q, n_k, causal)
            return near if seen is None else near & seen

        return mask

    def earlier_only(n_q: int, n_k: int, causal: bool) -> Array:
        i, j = np.arange(n_q)[:, None] + n_k - n_q, np.arange(n_k)
        return (j < i) | ((i == 0) & (j == 0))

    yield named(
        layer,
        "a token attends to earlier tokens only, not to itself; the first one to itself",
        "the mask includes the diagonal: np.tri(n), without k=-1",
        lambda p, case: {"mask": earlier_only},
        "mask",
    )
    for k in (2, 3, 4, 5, 6, 8):
        yield named(
            layer,
            f"the mask is a window: a token attends to itself and the {k - 1} before it",
            "a token attends to itself and to all earlier tokens",
            lambda p, case, k=k: {"mask": windowed(p, k)},
            "mask",
        )
