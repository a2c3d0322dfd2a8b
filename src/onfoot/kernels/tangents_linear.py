"""The tangents of linear layers, LoRA layers, and layers that are linear in their input: products that accumulate.

The files `tangents_*` are `ops/tangents` as kernels. They take what the pairs of the other kernels save; for anything
else, the formulas are called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.kernels import dropout, embedding, linear, lora, rope, shapes
from onfoot.kernels.linear import FrozenLinearKernelSaved, LinearKernelSaved, affine, input_gradient, sum_rows
from onfoot.kernels.lora import LoRAKernelSaved
from onfoot.kernels.product import product
from onfoot.kernels.shapes import as_rows
from onfoot.kernels.update import add, scale_by, times
from onfoot.ops import tangents as formulas


def linear_tangent(x_dot: Any, weight_dot: Any, bias_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = ẋ w + x ẇ + ḃ."""
    if not isinstance(saved, LinearKernelSaved):
        return formulas.linear_tangent(x_dot, weight_dot, bias_dot, saved)
    x, weight, has_bias = saved
    y_dot = affine(x_dot, weight, bias_dot)
    if weight_dot is not None:
        product(as_rows(x), weight_dot, out=as_rows(y_dot), accumulate=True)  # eq FC.5
    return y_dot, LinearKernelSaved(x_dot, weight_dot, has_bias)


def linear_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of x, weight and bias."""
    if not isinstance(saved, LinearKernelSaved):
        return formulas.linear_backward_tangent(dy, dy_dot, saved, saved_dot)
    x, weight, has_bias = saved
    dx_dot = input_gradient(dy_dot, weight)
    if saved_dot.weight is not None:
        product(as_rows(dy), saved_dot.weight.T, out=as_rows(dx_dot), accumulate=True)  # eq FC.6
    left, right = (as_rows(x), as_rows(saved_dot.x)), (as_rows(dy), as_rows(dy_dot))
    if not weight.flags.c_contiguous:  # stored (out, in): so is its gradient
        dweight_dot = weight_gradient_tangent(right, left).T
    else:
        dweight_dot = weight_gradient_tangent(left, right)
    return dx_dot, dweight_dot, sum_rows(right[1]) if has_bias else None  # eq FC.8


def weight_gradient_tangent(left: tuple[Any, Any], right: tuple[Any, Any]) -> np.ndarray:
    """The tangent of leftᵗ right, each with its tangent."""
    made = product(left[1].T, right[0])
    return product(left[0].T, right[1], out=made, accumulate=True)  # eq FC.7


def frozen_linear_tangent(x_dot: Any, weight_dot: None, bias_dot: None, saved: Any) -> tuple[Any, Any]:
    """ẏ = ẋ w."""
    if not isinstance(saved, FrozenLinearKernelSaved):
        return formulas.frozen_linear_tangent(x_dot, weight_dot, bias_dot, saved)
    return affine(x_dot, saved.weight, None), None


def frozen_linear_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> Any:
    """The tangent of the gradient of x."""
    if not isinstance(saved, FrozenLinearKernelSaved):
        return formulas.frozen_linear_backward_tangent(dy, dy_dot, saved, saved_dot)
    return input_gradient(dy_dot, saved.weight)


def lora_linear_tangent(
    x_dot: Any, weight_dot: None, bias_dot: None, down_dot: Any, up_dot: Any, saved: Any
) -> tuple[Any, Any]:
    """ẏ of a frozen layer and its LoRA layer."""
    if not isinstance(saved, LoRAKernelSaved):
        return formulas.lora_linear_tangent(x_dot, weight_dot, bias_dot, down_dot, up_dot, saved)
    x, weight, keep, down, up, scale, low = saved
    x, moved = (_kept(one, keep) for one in (x, x_dot))
    y_dot = affine(x_dot, weight, None)
    low_dot = product(moved, down)
    product(x, down_dot, out=low_dot, accumulate=True)
    scale_by(low_dot, scale)  # eq LORA.3
    product(low_dot, up, out=as_rows(y_dot), accumulate=True)
    product(low, up_dot, out=as_rows(y_dot), accumulate=True)  # eq LORA.4
    return y_dot, LoRAKernelSaved(x_dot, weight, keep, down_dot, up_dot, scale, low_dot)


def lora_linear_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any, Any]:
    """Tangents of the gradients of x, down and up."""
    if not isinstance(saved, LoRAKernelSaved):
        return formulas.lora_linear_backward_tangent(dy, dy_dot, saved, saved_dot)
    x, weight, keep, down, up, scale, low = saved
    right, right_dot = as_rows(dy), as_rows(dy_dot)
    dlow, dlow_dot = product(right, up.T), product(right_dot, up.T)
    product(right, saved_dot.up.T, out=dlow_dot, accumulate=True)
    scale_by(dlow, scale)
    scale_by(dlow_dot, scale)
    dx_dot = input_gradient(dy_dot, weight)
    through = as_rows(dx_dot) if keep is None else None
    through = product(dlow_dot, down.T, out=through, accumulate=keep is None)
    product(dlow, saved_dot.down.T, out=through, accumulate=True)  # eq LORA.5
    if keep is not None:
        dx_dot = add(dx_dot, times(through.reshape(dx_dot.shape), keep))
    left = _kept(x, keep), _kept(saved_dot.x, keep)
    ddown_dot = weight_gradient_tangent(left, (dlow, dlow_dot))  # eq LORA.6
    dup_dot = weight_gradient_tangent((low, saved_dot.low), (right, right_dot))  # eq LORA.7
    return dx_dot, ddown_dot, dup_dot


def _kept(x: Any, keep: Any) -> Any:
    return as_rows(x if keep is None else times(x, keep))


def embedding_tangent(weight_dot: Any, saved: Any) -> tuple[Any, None]:
    """Rows of the direction."""
    return embedding.embedding_forward(saved.ids, weight_dot)[0], None  # eq EMB.2


def embedding_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: None) -> Any:
    """The tangent of the gradient of weight."""
    return embedding.embedding_backward(dy_dot, saved)  # eq EMB.3


def dropout_tangent(x_dot: Any, saved: Any) -> tuple[Any, None]:
    """ẏ = ẋ ∘ keep."""
    return dropout.dropout_backward(x_dot, saved), None  # eq DO.3


def dropout_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: None) -> Any:
    """The tangent of the gradient of x."""
    return dropout.dropout_backward(dy_dot, saved)  # eq DO.4


def rope_tangent(x_dot: Any, saved: Any) -> tuple[Any, None]:
    """ẋ, rotated as x is."""
    return rope.rope_forward(x_dot, saved.cos, saved.sin, saved.interleaved)[0], None  # eq ROPE.6


def rope_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: None) -> Any:
    """The tangent of the gradient of x."""
    return rope.rope_backward(dy_dot, saved)  # eq ROPE.7


KERNELS = (*linear.KERNELS, *lora.KERNELS, *embedding.KERNELS, *dropout.KERNELS, *rope.KERNELS, *shapes.KERNELS)
