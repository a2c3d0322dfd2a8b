"""The head that every family ends with: from features to logits. Tied, its weight is the token table."""

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
