"""The LM head of every family: from features to logits and the loss. If tied, its weight is the token table."""

from __future__ import annotations

from typing import Any, NamedTuple

from onfoot.arrays import Array, Shape
from onfoot.config import Config
from onfoot.models.layout import Targets
from onfoot.models.params import HEAD
from onfoot.models.run import Run


class ChosenRowsSaved(NamedTuple):
    loss: Any
    rows: Any
    shape: Shape  # of a_11


def head_forward(run: Run, config: Config, a11: Array) -> tuple[Array, Any]:
    """a_11 -> a_12: the logits, (B, T, V)."""
    a12, saved = run.linear(HEAD, a11)
    return a12, saved


def head_backward(run: Run, config: Config, d12: Array, saved: Any) -> Array:
    """Δ_12 -> Δ_11, and the gradients of the head."""
    run.on_activation(f"d {HEAD} out", d12)
    return run.linear_backward(HEAD, d12, saved)  # eq TIE.1: if tied, one of two paths


def loss_forward(run: Run, config: Config, a11: Array, targets: Targets, divisor: Array | float) -> tuple[Any, Any]:
    """a_11 -> the loss. Tokens without a target have no logits, unless nearly all have one or the pass is traced.

    Dropout of a LoRA layer on the head has a pattern of all tokens, so it needs them all.
    """
    if targets.rows is None or run.traced or run.linears.drops_inputs(HEAD):
        return _all_rows(run, config, a11, targets.ids, divisor)
    chosen, s_rows = run.engine.embedding_forward(targets.rows, a11.reshape(-1, a11.shape[-1]))  # (M, C)
    loss, saved = _all_rows(run, config, chosen, targets.chosen, divisor)
    return loss, ChosenRowsSaved(saved, s_rows, a11.shape)


def loss_backward(run: Run, config: Config, saved: Any) -> Array:
    """Δ_11, and the gradients of the head. Δ_11 of a token without a target is 0."""
    if not isinstance(saved, ChosenRowsSaved):
        return _all_rows_backward(run, config, saved)
    d_chosen = _all_rows_backward(run, config, saved.loss)  # (M, C)
    return run.engine.embedding_backward(d_chosen, saved.rows).reshape(saved.shape)


def _all_rows(run: Run, config: Config, x: Array, targets: Array, divisor: Array | float) -> tuple[Any, Any]:
    """The loss of all rows of x. A fused engine never holds all logits at once."""
    if run.linears.fuse_loss():
        return run.linears.loss(HEAD, x, targets, divisor)
    a12, s_head = head_forward(run, config, x)
    loss, s_loss = run.engine.cross_entropy_forward(a12, targets, divisor)
    return loss, (s_head, s_loss)


def _all_rows_backward(run: Run, config: Config, saved: Any) -> Array:
    if run.linears.fuse_loss():
        return run.linears.loss_backward(HEAD, saved)
    s_head, s_loss = saved
    return head_backward(run, config, run.engine.cross_entropy_backward(1.0, s_loss), s_head)
