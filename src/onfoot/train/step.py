"""One optimizer step: gradients of its microbatches, summed over the ranks, clipped and applied.

Used by `Model.train_step`, the trainer and `onfoot bench`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.train.optimizer import AdamW, clip_scale

if TYPE_CHECKING:
    from onfoot.models.model import Model
    from onfoot.train.buckets import GradientAccumulator
    from onfoot.train.parallel import World


class Microbatch(NamedTuple):
    """Tokens and targets of one forward and backward pass."""

    tokens: Any
    targets: Any
    segments: Any = None
    dropout_seed: int | None = None


Gradients = Callable[..., tuple[float, Any]]  # (model, batch, divisor, on_gradient, on_loss) -> (loss, ...)
Diverged = Callable[[str, bool], Exception]  # (problem, whether some weights were updated) -> the error to raise


def fused_step(
    model: Model,
    optimizer: AdamW,
    batch: Microbatch,
    divisor: float | None,
    lr: float | None,
    diverged: Diverged,
    norm: bool = True,
) -> tuple[float, float]:
    """One step without clipping, the optimizer fused into the backward pass; returns the loss and gradient norm.

    Each parameter is updated soon after its gradient is final, when its old value is no longer needed: only a few
    gradients exist at a time. Without `norm`, the returned norm is 0.
    """
    squares, changed = 0.0, False

    def on_loss(loss: float) -> None:
        if not math.isfinite(loss):
            raise diverged(f"the loss is {loss}", False)

    def on_gradient(name: str, grad: Array) -> None:
        nonlocal squares, changed
        squares += optimizer.squares({name: grad}) if norm else 0.0
        if not math.isfinite(squares):
            raise diverged(f"the gradient of {name} is not finite", changed)
        optimizer.update(name, grad)
        changed = True

    with optimizer.one_step(lr):
        loss, _ = _gradients(model, batch, divisor, on_gradient, on_loss)
    return loss, math.sqrt(squares)


def accumulated_step(
    model: Model,
    optimizer: AdamW,
    batches: Sequence[Any],
    divisor: float | None,
    lr: float | None,
    clip: float,
    diverged: Diverged,
    accumulator: GradientAccumulator | None = None,
    world: World | None = None,
    on_gradients: Callable[[dict[str, Array]], None] | None = None,
    gradients: Gradients | None = None,
) -> tuple[float, float]:
    """One step over microbatches and ranks; returns the mean loss and the gradient norm before clipping.

    `divisor` is the number of targets of all microbatches on all ranks. Gradients are complete before any update, and
    `on_gradients` may change them. `gradients` computes those of one of the batches, by default of the
    cross-entropy of a `Microbatch`.
    """
    from onfoot.train.buckets import GradientAccumulator

    accumulator = accumulator or GradientAccumulator()
    accumulator.begin()
    loss = 0.0
    for i, batch in enumerate(batches):
        if i == len(batches) - 1:
            accumulator.last()
        loss += (gradients or _gradients)(model, batch, divisor, accumulator.add, None)[0]
    grads = accumulator.finish()
    if on_gradients is not None:
        on_gradients(grads)
    squares = optimizer.squares(grads)
    table = np.array([[loss, squares]]) if world is None else world.table(loss, squares)
    loss, norm = float(table[:, 0].sum()), math.sqrt(accumulator.total_squares(table[:, 1]))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        error = diverged(f"the loss is {loss} and the gradient norm is {norm}", False)
        raise error if world is None else world.agreed(error)
    optimizer.step(grads, lr, clip_scale(norm, clip))
    return loss, norm


def _gradients(
    model: Model, batch: Microbatch, divisor: float | None, on_gradient: Callable[[str, Array], None], on_loss: Any
) -> tuple[float, Any]:
    return model.loss_and_grads(
        batch.tokens,
        batch.targets,
        divisor=divisor,
        segments=batch.segments,
        dropout_seed=batch.dropout_seed,
        on_gradient=on_gradient,
        on_loss=on_loss,
    )
