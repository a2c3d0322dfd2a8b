"""Slips that neither the catalogue nor a generic probe has: whole formulas that are another function's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.constants import named
from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.layers.cross_entropy import one_hot
from onfoot.ops.cross_entropy import IGNORE


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    """The slips of a layer with these options."""
    names = layer.pieces.names()
    if "y_gt" in names:
        yield from _losses(layer)
    if "shift" in names:
        yield from _shifts(layer)
    if "scatter" in names:
        yield from _tables(layer)
    if "bracket" in names:
        yield from _norms(layer)
    if "second" in names:
        yield from _moments(layer, options["beta2"])
    if "side_by_side" in names:
        yield from _packed(layer)
    if "row_dots" in names:
        yield from _softmax(layer)


# losses


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


def _shifts(layer: Layer) -> Iterator[Mistake]:
    """Targets by another distance; the rows that have none then count, or do not."""
    for by, words in ((0, "the token itself"), (2, "the next token but one"), (-1, "the token before")):
        says = f"the target of a token is {words}"
        fix = "the target of token t is ids[t + 1]"
        kept = _shifted(by)
        yield named(layer, f"{says}, in all rows that have a target", fix, _with_shift(kept, None), "shift")
        yield named(
            layer,
            f"{says}; the last row is left out",
            fix,
            _with_shift(kept, lambda ids: np.arange(ids.shape[-1]) < ids.shape[-1] - 1),
            "shift",
            "y_gt",
        )


def _shifted(by: int) -> Callable[[Array], Array]:
    def shift(ids: Array) -> Array:
        out = np.full_like(ids, IGNORE)
        n = ids.shape[-1]
        for t in range(n):
            if 0 <= t + by < n:
                out[..., t] = ids[..., t + by]
        return out

    return shift


def _with_shift(
    shift: Callable[[Array], Array], rows: Callable[[Array], Array] | None
) -> Callable[..., dict[str, Piece]]:
    """The pass with these targets; `rows` are those that count, whether they have a target or not."""

    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        ids = case.inputs[1]
        if rows is None:
            return {"shift": shift}
        counted = np.broadcast_to(rows(ids), ids.shape)
        targets = np.where(counted, shift(ids), IGNORE)
        return {
            "shift": lambda ids: np.where(counted, 0, IGNORE),  # which rows count, and how many
            "y_gt": lambda _, n: one_hot(targets, n),
        }

    return apply


# tables


def _tables(layer: Layer) -> Iterator[Mistake]:
    for row, words in ((0, "id 0"), (-1, "the last id")):

        def without(p: Pieces, case: Case, row: int = row) -> dict[str, Piece]:
            def scatter(ids: Array, dy: Array, n_rows: int) -> Array:
                found: Array = p.scatter(ids, dy, n_rows)
                found[row] = 0
                return found

            return {"scatter": scatter}

        says = f"{words} is taken for padding and gets no gradient"
        yield named(layer, says, "every id gets the rows of dout at its tokens", without, "scatter")
    yield named(
        layer,
        "repeated ids lost: only their first occurrence counts",
        "np.add.at(dweight, ids, dout), or index_add_ in PyTorch",
        lambda p, case: {"scatter": _first_only},
        "scatter",
    )
    if "both_paths" in layer.pieces.names():
        yield named(
            layer,
            "the gradient through the embedding overwrites that through the logits, in the rows of the ids",
            "add both: np.add.at(dweight, ids, …), not dweight[ids] = …",
            lambda p, case: {"scatter": _overwriting, "both_paths": _where_given},
            "scatter",
            "both_paths",
        )
        yield named(
            layer,
            "the gradient through the logits overwrites that through the embedding",
            "add both gradients",
            lambda p, case: {"both_paths": lambda embedding, logits: logits + 0 * embedding},
            "both_paths",
        )


def _first_only(ids: Array, dy: Array, n_rows: int) -> Array:
    out = np.zeros((n_rows, dy.shape[-1]))
    out[ids.ravel()[::-1]] = dy.reshape(-1, dy.shape[-1])[::-1]
    return out


def _overwriting(ids: Array, dy: Array, n_rows: int) -> Array:
    """The last occurrence of each id; nan in the rows of other ids."""
    out = np.full((n_rows, dy.shape[-1]), np.nan)
    out[ids] = dy
    return out


def _where_given(embedding: Array, logits: Array) -> Array:
    return np.where(np.isnan(embedding), logits, embedding)


# norms


def _norms(layer: Layer) -> Iterator[Mistake]:
    if layer.name == "layer_norm":
        yield named(
            layer,
            "x − mean in place of one of the two ā in the last term of dx, ā · mean(g ∘ ā)",
            "dx = (g − mean(g) − ā · mean(g ∘ ā))/σ: both are ā = (x − mean)/σ",
            lambda p, case: {"along_term": lambda normed, g: p.along_term(normed, g) / _scale_of(normed, case)},
            "along_term",
        )


def _scale_of(normed: Array, case: Case) -> Any:
    """1/σ, from ā and x."""
    x = case.inputs[0]
    centred = x - x.mean(axis=-1, keepdims=True)
    square = (centred * centred).sum(axis=-1, keepdims=True)
    return np.where(square == 0, 1, (normed * centred).sum(axis=-1, keepdims=True) / np.where(square == 0, 1, square))


# AdamW


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
        "the bias corrections use the step before, t − 1",
        "m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ) with t = 1 in the first step",
        lambda p, case: {
            "first_corrected": lambda m, beta1, beta2, t: p.first_corrected(m, beta1, beta2, t - 1),
            "second_corrected": lambda v, beta1, beta2, t: p.second_corrected(v, beta1, beta2, t - 1),
        },
        "first_corrected",
        "second_corrected",
    )
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


# heads


def _packed(layer: Layer) -> Iterator[Mistake]:
    def interleaved(case: Case) -> Piece:
        heads = int(case.sizes["H"])

        def piece(dq: Array, dk: Array, dv: Array) -> Array:
            parts = [x.reshape(*x.shape[:-1], heads, -1) for x in (dq, dk, dv)]
            return np.stack(parts, axis=-2).reshape(*dq.shape[:-1], -1)

        return piece

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
