"""Fully connected layer: y = x w + b.

Weights are stored (in, out), as the paper and GPT-2's files have them. Leading axes are free: every row is a token.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array


class Saved(NamedTuple):
    x: Array
    weight: Array
    has_bias: bool


def linear_forward(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Saved]:
    """y = x w + b~, the bias broadcast over the tokens."""
    y = x @ weight  # eq FC.1  (..., in) (in, out) -> (..., out)
    if bias is not None:
        y = y + bias
    return y, Saved(x, weight, bias is not None)


def linear_backward(dy: Array, saved: Saved) -> tuple[Array, Array, Array | None]:
    """Gradients of x, weight and bias (None where there is no bias)."""
    x, weight, has_bias = saved
    dx = dy @ weight.T  # eq FC.2  (..., in)
    dy2 = dy.reshape(-1, dy.shape[-1])  # (N, out): all tokens of the batch in one column of rows
    dweight = x.reshape(-1, x.shape[-1]).T @ dy2  # eq FC.3  (in, out)
    dbias = dy2.sum(axis=0) if has_bias else None  # eq FC.4  (out,)
    return dx, dweight, dbias


class FrozenSaved(NamedTuple):
    weight: Array


def frozen_linear_forward(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, FrozenSaved]:
    """The same layer with weights that do not train: x need not be kept."""
    y = x @ weight  # eq FC.1
    if bias is not None:
        y = y + bias
    return y, FrozenSaved(weight)


def frozen_linear_backward(dy: Array, saved: FrozenSaved) -> Array:
    """The gradient of x alone: the error signal passes through a frozen layer."""
    return dy @ saved.weight.T  # eq FC.2  (..., in)
