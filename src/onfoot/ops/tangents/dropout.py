"""The tangents of dropout: it is linear in x."""

from __future__ import annotations

from onfoot.arrays import Array
from onfoot.ops.dropout import DropoutSaved


def dropout_tangent(x_dot: Array, saved: DropoutSaved) -> tuple[Array, None]:
    """ẏ = ẋ ∘ keep."""
    return x_dot * saved.keep, None  # eq DO.3


def dropout_backward_tangent(dy: Array, dy_dot: Array, saved: DropoutSaved, saved_dot: None) -> Array:
    """The tangent of the gradient of x."""
    return dy_dot * saved.keep  # eq DO.4
