"""A frozen linear layer with LoRA: the low-rank product accumulates into the result of the large one.

The dropout pattern `keep`, if any, is applied only to the input of the low-rank part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels import linear, update
from onfoot.kernels.linear import affine, input_gradient, shapes_match
from onfoot.kernels.product import product
from onfoot.kernels.shapes import as_rows, fall_back_to_formula, is_float32, upstream
from onfoot.kernels.update import add, scale_by, times


class LoRAKernelSaved(NamedTuple):
    x: np.ndarray
    weight: np.ndarray
    keep: np.ndarray | None
    down: np.ndarray
    up: np.ndarray
    scale: float
    low: np.ndarray  # α (x ∘ keep) d, (N, r)


def _fit(x: np.ndarray, weight: Any, down: Any, up: Any, keep: Any) -> bool:
    """Whether the shapes of LoRA layer, base layer, dropout pattern and input match."""
    if not is_float32(down, up) or down.ndim != 2 or down.shape[0] != weight.shape[0]:
        return False
    if keep is not None and not (is_float32(keep) and keep.shape == x.shape):
        return False
    return up.shape == (down.shape[1], weight.shape[1])


def lora_linear_forward(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    down: np.ndarray,
    up: np.ndarray,
    scale: float,
    keep: np.ndarray | None = None,
    skip: np.ndarray | None = None,
) -> tuple[np.ndarray, Any]:
    """y = x w + b + α (x ∘ keep) d u: a frozen layer and its LoRA layer; `keep` is a dropout pattern."""
    if not (shapes_match(x, weight, bias, skip) and _fit(x, weight, down, up, keep)):
        y, saved = fall_back_to_formula(ops.lora_linear_forward, x, weight, bias, down, up, scale, keep)
        return y if skip is None else skip + y, saved
    y = affine(x, weight, bias, skip=skip)
    low = product(as_rows(x if keep is None else times(x, keep)), down)  # (N, r)
    scale_by(low, scale)
    product(low, up, out=as_rows(y), accumulate=True)  # eq LORA.1
    return y, LoRAKernelSaved(x, weight, keep, down, up, scale, low)


def lora_linear_skip(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    skip: np.ndarray,
    down: np.ndarray,
    up: np.ndarray,
    scale: float,
    keep: np.ndarray | None = None,
) -> tuple[np.ndarray, Any]:
    """With a skip connection: y = skip + x w + b + α (x ∘ keep) d u."""
    if skip is None:
        raise TypeError("lora_linear_skip: skip must not be None")
    return lora_linear_forward(x, weight, bias, down, up, scale, keep, skip)


def lora_linear_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, down and up. That of x is the sum of BOTH paths, including the frozen one."""
    if not isinstance(saved, LoRAKernelSaved):
        return ops.lora_linear_backward(dy, saved)
    x, weight, keep, down, up, scale, low = saved
    dy = upstream(dy, x.shape[:-1] + weight.shape[1:])
    rows = as_rows(dy)
    dlow = product(rows, up.T)  # (N, r)
    scale_by(dlow, scale)
    dx = input_gradient(dy, weight)
    if keep is None:
        product(dlow, down.T, out=as_rows(dx), accumulate=True)  # eq LORA.2
    else:
        dx = add(dx, times(product(dlow, down.T).reshape(dx.shape), keep))
    ddown = product(as_rows(x if keep is None else times(x, keep)).T, dlow)  # eq 45
    dup = product(low.T, rows)  # eq 46
    return dx, ddown, dup


KERNELS = (*linear.KERNELS, *update.KERNELS)
