"""Exercise 1: a product and a bias. The page is e01_linear.md; check with: onfoot learn check 1"""

import numpy as np


def rows(x):
    """(..., C) -> (N, C): one row per token. NumPy's x.reshape undoes it."""
    return x.reshape(-1, x.shape[-1])


def linear_forward(x, weight, bias=None):
    """y = x weight + bias. Given: x (..., in), weight (in, out), bias (out,); y is (..., out)."""
    y = (rows(x) @ weight).reshape(*x.shape[:-1], weight.shape[-1])
    if bias is not None:
        y += bias
    return y, (x, weight, bias is not None)


def linear_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., out), the gradient of y. To write."""
    x, weight, has_bias = saved
    dx = None  # shape (..., in)
    dweight = None  # shape (in, out)
    dbias = None  # shape (out,)
    return dx, dweight, dbias if has_bias else None
