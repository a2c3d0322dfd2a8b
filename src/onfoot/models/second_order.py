"""Second order by hand: Hessian-vector products and directional derivatives of every example's loss, in one pass.

A pass on duals (`dual.py`) computes the loss, the gradient, and their derivatives along a direction in the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.models.dual import KINDS, Dual, DualEngine, value
from onfoot.models.recorded_tangents import recorded_tangents
from onfoot.models.step import Batch, checked_batch, forward_backward

if TYPE_CHECKING:
    from onfoot.models.model import Model


class TangentPass(NamedTuple):
    """The loss and the gradient, and their derivatives along a direction."""

    loss: float
    token_dots: np.ndarray  # (B, T): of each token's loss / divisor; 0 for a token without a target
    grads: dict[str, Array]  # empty for Gauss–Newton, which does not compute them, and without `gradients`
    hvp: dict[str, Array]  # H u, or G u


def tangent_pass(
    model: Model,
    tokens: Any,
    targets: Any,
    direction: Mapping[str, Any],
    *,
    kind: str = "hessian",
    divisor: float | None = None,
    segments: Any = None,
    dropout_seed: int | None = None,
    backward: bool = True,
    gradients: bool = True,
) -> TangentPass:
    """One forward pass with tangents, and one backward pass with tangents unless `backward` is False.

    Without `gradients`, only their tangents are returned, which is faster.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
    model.engine.require_formulas("a product with the Hessian")
    moves = check_direction(model, direction)
    batch = checked_batch(model, tokens, targets, divisor, segments)
    done = recorded_tangents(model, batch._replace(dropout_seed=dropout_seed), moves, kind, backward, gradients)
    if done is not None:
        return TangentPass(done.loss, _by_token(done.dots, batch), done.grads, done.hvp)
    engine = DualEngine(model.engine, kind, gradients)
    run = model.new_run(keep_saved=backward, dropout_seed=dropout_seed, engine=engine)
    run.params = {name: Dual(p, moves.get(name)) for name, p in model.params.items()}
    ids, wanted, layout, divisor, _ = batch.on_engine(engine)
    loss = forward_backward(run, model.config, ids, wanted, layout, divisor, backward)
    dots = np.concatenate([to_numpy(part) for part in engine.token_dots])
    made = run.gradients.made
    hvp = {n: g.tangent if isinstance(g, Dual) else g for n, g in made.items()}
    grads = {n: g.value for n, g in made.items() if gradients and isinstance(g, Dual)}
    return TangentPass(float(value(loss)), _by_token(dots, batch), grads, hvp)


def _by_token(dots: np.ndarray, batch: Batch) -> np.ndarray:
    """One number per token (B, T), from those of the rows that have a target."""
    out = np.zeros(batch.tokens.size, dots.dtype)
    rows: Any = np.arange(out.size) if batch.targets.rows is None else batch.targets.rows
    np.add.at(out, rows, dots)  # rows are padded with 0s that have no target
    return out.reshape(batch.tokens.shape)


def check_direction(model: Model, direction: Mapping[str, Any]) -> dict[str, Array]:
    """The direction as arrays of the model's engine, or a ValueError."""
    made = {}
    for name, u in direction.items():
        if name not in model.trainable:
            raise ValueError(f"the direction has {name!r}, which is not a trainable parameter of this model")
        u = model.engine.floats(u, model.dtype)
        if tuple(u.shape) != tuple(model.params[name].shape):
            expected = tuple(model.params[name].shape)
            raise ValueError(f"the direction of {name} has shape {tuple(u.shape)}, expected {expected}")
        made[name] = u
    if model.active_adapter is not None:  # the tangents of a LoRA layer need both of its factors
        missing = model.trainable - made.keys()
        made |= {name: model.engine.floats(np.zeros(model.params[name].shape), model.dtype) for name in missing}
    return made
