"""Preference tuning (DPO): the gradient of a pair, and the reference log-probabilities.

The log-probability of an answer is minus the sum of its tokens' cross-entropies. So the gradient of a pair's loss is
the difference of two ordinary gradients, times one number that is known once both forward passes are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.data.batches import Batch
from onfoot.data.count import Count
from onfoot.data.preference_source import Pair, Pairs, PreferenceSource
from onfoot.ops.dpo import DpoSaved, dpo_loss_backward, dpo_loss_forward

if TYPE_CHECKING:
    from onfoot.models.model import Model


class PairResult(NamedTuple):
    loss: float  # over the divisor
    margin: float  # β times how much more the chosen answer gained over the reference than the rejected one


class SeededPair(NamedTuple):
    """A pair, and the dropout seeds of its two passes; None: no dropout."""

    pair: Pair
    seeds: tuple[int | None, int | None] = (None, None)


def log_prob(model: Model, row: Batch) -> float:
    """The log-probability of an answer: the sum over its tokens, given those before."""
    return -model.loss(row.tokens, row.targets, divisor=1.0)


def pair_loss(model: Model, pair: Pair, beta: float, label_smoothing: float = 0.0) -> PairResult:
    """The loss of a pair and its margin."""
    logs = log_prob(model, pair.chosen), log_prob(model, pair.rejected)
    loss, saved = _loss(logs, pair, beta, label_smoothing, 1.0)
    return PairResult(float(loss), saved.margin.item())


def pair_gradients(
    model: Model,
    one: SeededPair,
    beta: float,
    label_smoothing: float,
    divisor: float,
    on_gradient: Callable[[str, Array], None],
) -> PairResult:
    """The loss of a pair over `divisor`, and its margin; calls `on_gradient` with the gradient of every parameter."""
    pair, seeds = one
    (minus_chosen, dchosen), (minus_rejected, drejected) = (
        model.loss_and_grads(row.tokens, row.targets, divisor=1.0, dropout_seed=seed)
        for row, seed in zip((pair.chosen, pair.rejected), seeds, strict=True)
    )
    loss, saved = _loss((-minus_chosen, -minus_rejected), pair, beta, label_smoothing, divisor)
    _, weight = dpo_loss_backward(1.0, saved)
    for name in list(dchosen):
        on_gradient(name, weight.item() * (dchosen.pop(name) - drejected.pop(name)))  # eq DPO.5
    return PairResult(float(loss), saved.margin.item())


def _loss(
    logs: tuple[float, float], pair: Pair, beta: float, label_smoothing: float, divisor: float
) -> tuple[Array, DpoSaved]:
    """The loss from the policy's log-probabilities of both answers, in float64."""
    chosen, rejected, ref_chosen, ref_rejected = (np.array([x]) for x in (*logs, *pair.reference))
    return dpo_loss_forward(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing, divisor)


@contextmanager
def as_reference(model: Model) -> Iterator[None]:
    """The model as it was before its adapter: that is switched off for a while."""
    active = model.active_adapter
    if active is None:
        yield
        return
    trainable = model.trainable
    model.use_adapter(None)
    try:
        yield
    finally:
        model.use_adapter(active)
        model.trainable = trainable


def reference_log_probs(model: Model, pairs: Pairs, count: Count | None = None) -> np.ndarray:
    """The log-probabilities of the chosen and rejected answers without the adapter, (N, 2)."""
    out, count = np.empty((len(pairs), 2)), count or Count("answers")
    with as_reference(model):
        for row, pair in zip(out, pairs.examples, strict=True):
            row[:] = [log_prob(model, pairs.row(example)) for example in pair]
            count.done += 2
    if not np.isfinite(out).all():
        number = int(np.flatnonzero(~np.isfinite(out).all(1))[0])
        where = pairs.examples[number][0].where
        raise ValueError(
            f"{where}: the reference gives the log-probabilities {out[number].tolist()}; check its weights"
        )
    return out


def set_reference(model: Model, source: PreferenceSource, count: Count | None = None) -> None:
    """Computes the reference log-probabilities of all pairs with this model, its adapter switched off."""
    for pairs in (source.train, source.held_out):
        pairs.reference = reference_log_probs(model, pairs, count)
