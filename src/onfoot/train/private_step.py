"""One private step (DP-AdamW): every example's gradient is clipped, and noise is added to their sum.

An example's loss is the mean over its own targets. So its gradient depends on no other example, which clipping and the
guarantee need, and its norm does not grow with its length.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from onfoot.arrays import Array, to_numpy, zeros_like_shape
from onfoot.models.examples import example_pass
from onfoot.models.step import checked_batch
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.buckets import GradientAccumulator
from onfoot.train.optimizer import AdamW
from onfoot.train.step import Diverged, Microbatch, accumulated_step

if TYPE_CHECKING:
    from onfoot.models.model import Model

SAFE = 1 - 1e-5  # of the clipping norm: rounding in float32 must not take an example beyond it


class Settings(NamedTuple):
    """What a private step needs besides its batch."""

    clip: float  # c
    noise: float  # σ
    expected: float  # the expected number of examples, by which the sum is divided
    seed: int
    step: int


class PrivateResult(NamedTuple):
    """The loss is nan if no example was sampled."""

    loss: float
    norm: float  # of the gradient that the optimizer gets
    clipped: float  # the fraction of examples whose gradient was clipped


def private_step(
    model: Model, optimizer: AdamW, batches: Sequence[Microbatch], lr: float | None, with_: Settings, diverged: Diverged
) -> PrivateResult:
    """One step on these microbatches, of which there may be none; without clipping and noise, the ordinary step."""
    if math.isinf(with_.clip) and not with_.noise:
        n_targets = sum(int((to_numpy(b.targets) != IGNORE).sum()) for b in batches)
        loss, norm = accumulated_step(model, optimizer, batches, n_targets, lr, 0.0, diverged)
        return PrivateResult(loss, norm, 0.0)
    grads, loss, clipped = clipped_gradients(model, batches, with_.clip, with_.expected, diverged)
    if with_.noise:
        add_noise(model, grads, with_.noise * with_.clip / with_.expected, with_.seed, with_.step)  # eq EX.9
    norm = math.sqrt(optimizer.squares(grads))
    if not math.isfinite(norm):
        raise diverged(f"the gradient norm is {norm}", False)
    optimizer.step(grads, lr)
    return PrivateResult(loss, norm, clipped)


def clipped_gradients(
    model: Model, batches: Sequence[Microbatch], clip: float, expected: float, diverged: Diverged
) -> tuple[dict[str, Array], float, float]:
    """Σ over the examples of their clipped gradients, over `expected`; the mean loss; the fraction clipped."""
    accumulator = GradientAccumulator()
    loss, n_targets, n_examples, n_clipped = 0.0, 0, 0, 0
    for batch in batches:
        checked = checked_batch(model, batch.tokens, batch.targets, 1.0, batch.segments)
        one = example_pass(model, checked._replace(dropout_seed=batch.dropout_seed))
        norms = one.norms()
        if not np.isfinite(norms).all():
            raise diverged("the gradient of an example is not finite", False)
        weights = clip_weights(norms, one.n_targets, clip)
        real = one.n_targets > 0  # padding is an example without targets
        n_clipped += int((weights * one.n_targets < 1)[real].sum())
        n_examples += int(real.sum())
        n_targets += int(one.n_targets.sum())
        loss += one.loss
        one.weighted(weights / expected, accumulator.add)
    grads = accumulator.finish()
    for name in sorted(model.trainable - grads.keys()):  # no example, or none that reaches it
        grads[name] = zeros_like_shape(tuple(model.params[name].shape), model.params[name])
    return grads, loss / n_targets if n_targets else math.nan, n_clipped / max(1, n_examples)


def clip_weights(norms: np.ndarray, n_targets: np.ndarray, clip: float) -> np.ndarray:
    """The weight of each example: 1/n for its mean loss, times what clips that loss's gradient; 0 without targets.

    `norms` are those of the summed losses.
    """
    n, limit = np.maximum(n_targets, 1), SAFE * clip
    factor = limit / np.maximum(norms / n, limit)  # eq EX.8  min(1, c/‖g_e‖)
    return np.where(n_targets > 0, factor / n, 0.0)


def add_noise(model: Model, grads: dict[str, Array], deviation: float, seed: int, step: int) -> None:
    """Adds independent Gaussian noise to every gradient, in place, by the seed and the step alone."""
    for i, name in enumerate(sorted(grads)):
        if isinstance(grads[name], np.ndarray) and not grads[name].flags.c_contiguous:
            grads[name] = np.ascontiguousarray(grads[name])
        key = np.random.SeedSequence([seed, step, zlib.crc32(b"noise"), i]).generate_state(1, np.uint64)
        model.engine.add_noise(grads[name], deviation, int(key[0]))
