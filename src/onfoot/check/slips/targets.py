"""Slips in the targets of a loss: smoothed, shifted, indexed wrongly, counted wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces
from onfoot.check.layers.cross_entropy import one_hot
from onfoot.check.slips.made import factor, fitted, named
from onfoot.ops.cross_entropy import IGNORE


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "y_gt" in layer.pieces.names():
        yield from _of_targets(layer)
        yield from _indices(layer)
    if "shift" in layer.pieces.names():
        yield from _shifts(layer)
        yield from _run_together(layer)


def _of_targets(layer: Layer) -> Iterator[Mistake]:
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
                "lse": lambda logits: p.lse(factor(c) * logits),
                "y_pred": lambda logits, lse: p.y_pred(factor(c) * logits, lse),
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


INDEX = "one entry per row: y_pred[np.arange(rows), targets] -= 1, with the logits and the targets flattened alike"


def _indices(layer: Layer) -> Iterator[Mistake]:
    """The 1 is subtracted at more entries than one per row, or at an entry of another row."""

    def everywhere(targets: Array, n: int) -> Array:
        return np.broadcast_to(one_hot(targets, n).reshape(-1, n).max(axis=0), (*targets.shape, n))

    def in_sequence(targets: Array, n: int) -> Array:
        return np.broadcast_to(one_hot(targets, n).max(axis=1, keepdims=True), (*targets.shape, n))

    def counted(targets: Array, n: int) -> Array:
        return np.broadcast_to(one_hot(targets, n).reshape(-1, n).sum(axis=0), (*targets.shape, n))

    def of_position(targets: Array, n: int) -> Array:
        return np.broadcast_to(one_hot(targets, n).max(axis=0), (*targets.shape, n))

    def first_sequence(targets: Array, n: int) -> Array:
        return np.broadcast_to(one_hot(targets[:1], n), (*targets.shape, n))

    def last_sequence(targets: Array, n: int) -> Array:
        return np.broadcast_to(one_hot(targets[-1:], n), (*targets.shape, n))

    def only(position: int) -> Callable[[Array, int], Array]:
        def y_gt(targets: Array, n: int) -> Array:
            out = 0 * one_hot(targets, n)
            out[:, position] = one_hot(targets, n)[:, position]
            return out

        return y_gt

    def other_order(targets: Array, n: int) -> Array:
        return one_hot(targets.T.reshape(targets.shape), n)

    wrong: dict[str, Callable[[Array, int], Array]] = {
        "in every row, the 1 is subtracted at the targets of all rows (indices not paired)": everywhere,
        "in every row, the 1 is subtracted at the targets of its whole sequence (indices not paired)": in_sequence,
        "in every row, the 1 is subtracted once per token with that target, whichever the row": counted,
        "in every row, the 1 is subtracted at the targets of this position in all sequences": of_position,
        "the targets of the first sequence are used for all sequences": first_sequence,
        "the targets of the last sequence are used for all sequences": last_sequence,
        "the 1 is subtracted at the first token of each sequence only": only(0),
        "the 1 is subtracted at the last token of each sequence only": only(-1),
        "the targets are flattened in another order than the logits": other_order,
    }
    for says, y_gt in wrong.items():
        yield named(layer, says, INDEX, lambda p, case, f=y_gt: {"y_gt": f}, "y_gt")


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


def _run_together(layer: Layer) -> Iterator[Mistake]:
    """The batch is flattened before the shift: a sequence's last token predicts the first one of the next sequence."""

    def shift(last: int | None) -> Callable[[Array], Array]:
        def apply(ids: Array) -> Array:
            flat = np.roll(ids.reshape(-1), -1)
            flat[-1] = IGNORE if last is None else flat[-1]
            return flat.reshape(ids.shape)

        return apply

    says = "the batch is flattened before the shift: the last token of a sequence predicts the first of the next one"
    fix = "shift every sequence for itself: logits[:, :-1] and ids[:, 1:]"
    yield named(layer, says, fix, lambda p, case: {"shift": shift(None)}, "shift")
    yield named(layer, f"{says}, cyclically", fix, lambda p, case: {"shift": shift(0)}, "shift")


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
