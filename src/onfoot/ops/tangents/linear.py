"""The tangents of a linear layer and of its backward pass: the product rule, once more."""

from __future__ import annotations

from onfoot.arrays import Array, rows
from onfoot.ops.linear import FrozenLinearSaved, LinearSaved, input_gradient, product


def linear_tangent(
    x_dot: Array, weight_dot: Array | None, bias_dot: Array | None, saved: LinearSaved
) -> tuple[Array, LinearSaved]:
    """ẏ = ẋ w + x ẇ + ḃ. A frozen weight or bias has no tangent (None)."""
    x, weight, has_bias = saved
    y_dot = product(x_dot, weight)
    if weight_dot is not None:
        y_dot += product(x, weight_dot)
    if bias_dot is not None:
        y_dot += bias_dot  # eq FC.5
    return y_dot, LinearSaved(x_dot, weight_dot, has_bias)


def linear_backward_tangent(
    dy: Array, dy_dot: Array, saved: LinearSaved, saved_dot: LinearSaved
) -> tuple[Array, Array, Array | None]:
    """Tangents of the gradients of x, weight and bias."""
    x, weight, has_bias = saved
    x_dot, weight_dot, _ = saved_dot
    dx_dot = input_gradient(dy_dot, weight)
    if weight_dot is not None:
        dx_dot += input_gradient(dy, weight_dot)  # eq FC.6
    dweight_dot = rows(x_dot).T @ rows(dy) + rows(x).T @ rows(dy_dot)  # eq FC.7  (in, out)
    dbias_dot = rows(dy_dot).sum(axis=0) if has_bias else None  # eq FC.8  (out,)
    return dx_dot, dweight_dot, dbias_dot


def frozen_linear_tangent(
    x_dot: Array, weight_dot: None, bias_dot: None, saved: FrozenLinearSaved
) -> tuple[Array, FrozenLinearSaved]:
    """ẏ = ẋ w: nothing of the layer trains."""
    return product(x_dot, saved.weight), FrozenLinearSaved(None)


def frozen_linear_backward_tangent(
    dy: Array, dy_dot: Array, saved: FrozenLinearSaved, saved_dot: FrozenLinearSaved
) -> Array:
    """The tangent of the gradient of x."""
    return input_gradient(dy_dot, saved.weight)
