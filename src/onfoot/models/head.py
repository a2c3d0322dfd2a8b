"""The head that every family ends with: from features to logits and the loss. Tied, its weight is the token table."""

from __future__ import annotations

from typing import Any

from onfoot.arrays import Array
from onfoot.config import Config
from onfoot.models.params import HEAD
from onfoot.models.run import Run


def head_forward(run: Run, config: Config, a11: Array) -> tuple[Array, Any]:
    """a_11 -> a_12: the logits, (B, T, V)."""
    a12, saved = run.linear(HEAD, a11)
    run.note("a_12", a12)
    return a12, saved


def head_backward(run: Run, config: Config, d12: Array, saved: Any) -> Array:
    """Δ_12 -> Δ_11, and the gradients of the head."""
    run.note("Δ_12", d12)
    return run.linear_backward(HEAD, d12, saved)  # eq TIE.1: tied, one of two paths


def loss_forward(run: Run, config: Config, a11: Array, targets: Array, divisor: float) -> tuple[float, Any]:
    """a_11 -> the loss. An engine that can need not hold all logits at once."""
    if run.fuses_loss():
        return run.logits_loss(HEAD, a11, targets, divisor)
    a12, s_head = head_forward(run, config, a11)
    loss, s_loss = run.engine.cross_entropy_forward(a12, targets, divisor)
    return float(loss), (s_head, s_loss)


def loss_backward(run: Run, config: Config, saved: Any) -> Array:
    """Δ_11, and the gradients of the head."""
    if run.fuses_loss():
        return run.logits_loss_backward(HEAD, saved)
    s_head, s_loss = saved
    return head_backward(run, config, run.engine.cross_entropy_backward(1.0, s_loss), s_head)
