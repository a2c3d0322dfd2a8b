"""Linear layer: y = x w + b.

Weights are stored (in, out), as in the paper and in GPT-2's files. Leading axes are free: every row is a token.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, rows


class LinearSaved(NamedTuple):
    x: Array
    weight: Array
    has_bias: bool


def linear_forward(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, LinearSaved]:
    """y = x w + b~, the bias broadcast over the tokens."""
    return _affine(x, weight, bias), LinearSaved(x, weight, bias is not None)


def linear_backward(dy: Array, saved: LinearSaved) -> tuple[Array, Array, Array | None]:
    """Gradients of x, weight and bias (None where there is no bias)."""
    x, weight, has_bias = saved
    dx = input_gradient(dy, weight)
    dweight = weight_gradient(x, dy)
    dbias = rows(dy).sum(axis=0) if has_bias else None  # eq FC.4  (out,)
    return dx, dweight, dbias


def weight_gradient(x: Array, dy: Array) -> Array:
    """The gradient of weight alone, summed over all rows."""
    return rows(x).T @ rows(dy)  # eq FC.3  (in, out)


class FrozenLinearSaved(NamedTuple):
    weight: Array


def frozen_linear_forward(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, FrozenLinearSaved]:
    """`linear_forward` with frozen weights: x need not be kept."""
    return _affine(x, weight, bias), FrozenLinearSaved(weight)


def frozen_linear_backward(dy: Array, saved: FrozenLinearSaved) -> Array:
    """The gradient of x only: the weights are frozen."""
    return input_gradient(dy, saved.weight)


def _affine(x: Array, weight: Array, bias: Array | None) -> Array:
    y = product(x, weight)
    if bias is not None:
        y += bias  # eq FC.1
    return y


def product(x: Array, weight: Array) -> Array:
    y = rows(x) @ weight  # (N, in) (in, out) -> (N, out), one product for all tokens
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def input_gradient(dy: Array, weight: Array) -> Array:
    dx = rows(dy) @ weight.T  # eq FC.2  (N, out) (out, in) -> (N, in)
    return dx.reshape(*dy.shape[:-1], weight.shape[0])
