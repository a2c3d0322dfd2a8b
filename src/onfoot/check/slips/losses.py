"""Slips in cross-entropy: other probabilities, and the gradient of another loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import fitted, named, small
from onfoot.ops.cross_entropy import IGNORE


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "y_gt" in layer.pieces.names():
        yield from _losses(layer)
        yield from _sums(layer)
        yield from _axes(layer)


def _losses(layer: Layer) -> Iterator[Mistake]:
    yield named(
        layer,
        "the gradient of −y_pred[target]: the logarithm is missing from the loss",
        "the loss is −log y_pred[target]; its gradient y_pred − y_gt is not multiplied by y_pred[target]",
        lambda p, case: {
            "delta": lambda y_pred, y_gt: (y_pred * y_gt).sum(axis=-1, keepdims=True) * p.delta(y_pred, y_gt)
        },
        "delta",
    )
    yield named(
        layer,
        "y_gt/number of targets is rounded down to an integer (//, or an integer array)",
        "use a float array for the one-hot targets, and / in place of //",
        lambda p, case: {"y_gt": lambda targets, n: p.y_gt(targets, n) * float((targets != IGNORE).sum() == 1)},
        "y_gt",
    )
    yield named(
        layer,
        "the gradient of the squared error (y_pred − y_gt)², through softmax",
        "the loss is −log y_pred[target]: its gradient is y_pred − y_gt",
        lambda p, case: {"delta": lambda y_pred, y_gt: _through_softmax(y_pred, 2 * (y_pred - y_gt))},
        "delta",
    )
    yield named(
        layer,
        "y_pred − y_gt is passed through softmax once more",
        "y_pred − y_gt is already the gradient of the logits",
        lambda p, case: {"delta": lambda y_pred, y_gt: _through_softmax(y_pred, y_pred - y_gt)},
        "delta",
    )
    yield named(
        layer,
        "the derivative of sigmoid, y_pred (1 − y_pred), in place of softmax's",
        "y_pred − y_gt",
        lambda p, case: {"delta": lambda y_pred, y_gt: (y_pred - y_gt) * y_pred * (1 - y_pred)},
        "delta",
    )
    yield named(
        layer,
        "the sigmoid of the logits in place of their softmax",
        "y_pred = softmax(logits) over the vocabulary",
        lambda p, case: {"y_pred": lambda logits, lse: 0.5 * (1 + np.tanh(0.5 * logits))},
        "y_pred",
    )
    yield named(
        layer,
        "log y_pred in place of y_pred",
        "y_pred = softmax(logits): exp of the log-softmax",
        lambda p, case: {"y_pred": lambda logits, lse: logits - lse},
        "y_pred",
    )
    for says, of_pred in (("y_pred", True), ("y_gt", False)):
        yield named(
            layer,
            f"dout multiplies {says} only, not the difference y_pred − y_gt",
            "dout (y_pred − y_gt)/number of targets",
            lambda p, case, of_pred=of_pred: {
                "delta": lambda y_pred, y_gt: (
                    p.delta(case.inputs[-1] * y_pred, y_gt) if of_pred else p.delta(y_pred, case.inputs[-1] * y_gt)
                ),
                "divided": lambda delta, divisor, dloss: p.divided(delta, divisor, 1.0),
            },
            "delta",
            "divided",
        )
    yield named(
        layer,
        "y_gt ∘ y_pred is subtracted in place of the one-hot targets y_gt",
        "y_pred − y_gt: the 1 at the target is not multiplied by y_pred",
        lambda p, case: {"delta": lambda y_pred, y_gt: p.delta(y_pred, y_gt * y_pred)},
        "delta",
    )
    yield named(
        layer,
        "only the entry of the target has a gradient",
        "y_pred − y_gt in every entry of the row",
        lambda p, case: {"delta": lambda y_pred, y_gt: (y_pred - y_gt) * y_gt},
        "delta",
    )
    yield named(
        layer,
        "the 1 is subtracted from the largest probability, not from that of the target",
        "y_pred[target] − 1",
        lambda p, case: {"delta": lambda y_pred, y_gt: y_pred - (y_pred == y_pred.max(axis=-1, keepdims=True))},
        "delta",
    )


def _through_softmax(y: Array, dy: Array) -> Array:
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


def _sums(layer: Layer) -> Iterator[Mistake]:
    """A sum of exponentials that overflows, or numbers added before a division or a logarithm."""
    yield named(
        layer,
        "log Σ exp(logits) without subtracting the maximum: it overflows, and y_pred becomes 0",
        "subtract the largest logit of each row before exp, and add it to the logarithm",
        lambda p, case: {"lse": lambda logits: np.log(np.exp(logits).sum(axis=-1, keepdims=True))},
        "lse",
    )

    def y_pred(value: float) -> Piece:
        def piece(logits: Array, lse: Array) -> Array:
            e = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return e / (e.sum(axis=-1, keepdims=True) + value)

        return piece

    def delta(p: Pieces, value: float) -> Piece:
        def piece(y_pred: Array, y_gt: Array) -> Array:
            of_target = (y_pred * y_gt).sum(axis=-1, keepdims=True)
            return p.delta(y_pred, y_gt) * of_target / (of_target + value)

        return piece

    starts = (1e-9, 1e-8, 1e-12, 1e-6, 1e-5, 1e-10, 1e-7, 1e-15)
    yield fitted(
        layer,
        "a number is added to the sum of the exponentials",
        "added",
        starts,
        "divide exp(logits − max) by its sum alone, which is at least 1",
        lambda p, value: {"y_pred": y_pred(small(value))},
    )
    yield fitted(
        layer,
        "a number is added to y_pred in the logarithm, or in the division by it",
        "added",
        starts,
        "the gradient of −log y_pred[target] is y_pred − y_gt, without a division",
        lambda p, value: {"delta": delta(p, small(value))},
    )


def _axes(layer: Layer) -> Iterator[Mistake]:
    """The exponentials are divided by their sum over another axis."""
    seen = slice(None, -1) if "shift" in layer.pieces.names() else slice(None)

    def y_pred(axis: tuple[int, ...]) -> Piece:
        def piece(logits: Array, lse: Array) -> Array:
            e = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return e / e[:, seen].sum(axis=axis, keepdims=True)

        return piece

    for words, axis in (("the tokens", (1,)), ("all tokens and sequences", (0, 1)), ("all entries", (0, 1, 2))):
        yield named(
            layer,
            f"exp(logits) is divided by its sum over {words}, not over the vocabulary",
            "divide exp(logits) by its sum over the vocabulary, the last axis",
            lambda p, case, axis=axis: {"y_pred": y_pred(axis)},
            "y_pred",
        )
