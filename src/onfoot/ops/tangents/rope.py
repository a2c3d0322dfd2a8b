"""The tangents of RoPE: a rotation is linear in x."""

from __future__ import annotations

from onfoot.arrays import Array
from onfoot.ops.rope import RoPESaved, rope_backward, turn


def rope_tangent(x_dot: Array, saved: RoPESaved) -> tuple[Array, None]:
    """ẋ, rotated as x is."""
    return turn(x_dot, saved.cos, saved.sin, saved.interleaved), None  # eq ROPE.6


def rope_backward_tangent(dy: Array, dy_dot: Array, saved: RoPESaved, saved_dot: None) -> Array:
    """The tangent of the gradient of x: dẏ rotated back."""
    return rope_backward(dy_dot, saved)  # eq ROPE.7
