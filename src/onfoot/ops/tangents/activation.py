"""The tangents of the activations: g' forward, and g'' in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable

from onfoot.arrays import Array, namespace
from onfoot.ops.activation import (
    CUBIC,
    ROOT_2_OVER_PI,
    ActivationSaved,
    gelu_erf_backward,
    gelu_tanh_backward,
    relu_backward,
)


def relu_tangent(x_dot: Array, saved: ActivationSaved) -> tuple[Array, ActivationSaved]:
    """ẏ = ẋ where x > 0."""
    return relu_backward(x_dot, saved), ActivationSaved(x_dot)  # eq G.7


def relu_backward_tangent(dy: Array, dy_dot: Array, saved: ActivationSaved, saved_dot: ActivationSaved) -> Array:
    """The tangent of the gradient of x: g'' = 0 everywhere but at the kink."""
    return relu_backward(dy_dot, saved)


def gelu_tanh_tangent(x_dot: Array, saved: ActivationSaved) -> tuple[Array, ActivationSaved]:
    """ẏ = g'(x) ∘ ẋ."""
    return gelu_tanh_backward(x_dot, saved), ActivationSaved(x_dot)  # eq G.7


def gelu_tanh_backward_tangent(dy: Array, dy_dot: Array, saved: ActivationSaved, saved_dot: ActivationSaved) -> Array:
    """The tangent of the gradient of x."""
    return _backward_tangent(gelu_tanh_backward, gelu_tanh_curvature, dy, dy_dot, saved, saved_dot)


def gelu_erf_tangent(x_dot: Array, saved: ActivationSaved) -> tuple[Array, ActivationSaved]:
    """ẏ = g'(x) ∘ ẋ."""
    return gelu_erf_backward(x_dot, saved), ActivationSaved(x_dot)  # eq G.7


def gelu_erf_backward_tangent(dy: Array, dy_dot: Array, saved: ActivationSaved, saved_dot: ActivationSaved) -> Array:
    """The tangent of the gradient of x."""
    return _backward_tangent(gelu_erf_backward, gelu_erf_curvature, dy, dy_dot, saved, saved_dot)


def gelu_tanh_curvature(x: Array) -> Array:
    """g''(x) of the tanh form."""
    x2 = x * x
    tanh = namespace(x).tanh(ROOT_2_OVER_PI * (x + CUBIC * (x2 * x)))
    du = ROOT_2_OVER_PI * (1 + 3 * CUBIC * x2)  # u'
    d2u = 6 * ROOT_2_OVER_PI * CUBIC * x  # u''
    return (1 - tanh * tanh) * (du + 0.5 * x * d2u - x * tanh * (du * du))  # eq G.9


def gelu_erf_curvature(x: Array) -> Array:
    """g''(x) = φ(x) (2 − x²) of the exact form."""
    x2 = x * x
    return namespace(x).exp(-0.5 * x2) / math.sqrt(2 * math.pi) * (2 - x2)  # eq G.10


def _backward_tangent(
    backward: Callable[[Array, ActivationSaved], Array],
    curvature: Callable[[Array], Array],
    dy: Array,
    dy_dot: Array,
    saved: ActivationSaved,
    saved_dot: ActivationSaved,
) -> Array:
    return backward(dy_dot, saved) + dy * curvature(saved.x) * saved_dot.x  # eq G.8
