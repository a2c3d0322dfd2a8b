"""One step of training: the gradients of its microbatches, summed over ranks, clipped and applied.

`Model.train_step`, the trainer and `onfoot bench` all make their steps here.
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


class Part(NamedTuple):
    """One microbatch."""

    tokens: Any
    targets: Any
    segments: Any = None
    dropout_seed: int | None = None


Diverged = Callable[[str, bool], Exception]  # what is wrong, and whether some weights have changed already


def one_batch(
    model: Model,
    optimizer: AdamW,
    part: Part,
    divisor: float | None,
    lr: float | None,
    diverged: Diverged,
    norm: bool = True,
) -> tuple[float, float]:
    """A step on one batch without clipping: the loss before it, and with `norm` the gradients' norm.

    Each parameter is updated soon after its gradient is final, which is never before its old value was last used: only
    a few gradients exist at a time.
    """
    squares, changed = 0.0, False

    def heard(loss: float) -> None:
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
        loss, _ = _gradients(model, part, divisor, on_gradient, heard)
    return loss, math.sqrt(squares)


def several(
    model: Model,
    optimizer: AdamW,
    parts: Sequence[Part],
    divisor: float | None,
    lr: float | None,
    clip: float,
    diverged: Diverged,
    sums: GradientAccumulator | None = None,
    world: World | None = None,
) -> tuple[float, float]:
    """A step over several microbatches and ranks: the mean loss, and the gradients' norm before clipping.

    `divisor` is the number of targets of the whole step. All gradients exist before the first update.
    """
    from onfoot.train.buckets import GradientAccumulator

    sums = sums or GradientAccumulator()
    sums.begin()
    loss = 0.0
    for i, part in enumerate(parts):
        if i == len(parts) - 1:
            sums.last()
        loss += _gradients(model, part, divisor, sums.add, None)[0]
    grads = sums.finish()
    squares = optimizer.squares(grads)
    figures = np.array([[loss, squares]]) if world is None else world.table(loss, squares)
    loss, norm = float(figures[:, 0].sum()), math.sqrt(optimizer.total(figures[:, 1]))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        error = diverged(f"the loss is {loss} and the gradients' norm {norm}", False)
        raise error if world is None else world.agreed(error)
    optimizer.step(grads, lr, clip_scale(norm, clip))
    return loss, norm


def _gradients(
    model: Model, part: Part, divisor: float | None, on_gradient: Callable[[str, Array], None], on_loss: Any
) -> tuple[float, Any]:
    return model.loss_and_grads(
        part.tokens,
        part.targets,
        divisor=divisor,
        segments=part.segments,
        dropout_seed=part.dropout_seed,
        on_gradient=on_gradient,
        on_loss=on_loss,
    )
