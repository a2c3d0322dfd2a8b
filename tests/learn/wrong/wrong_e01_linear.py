"""Typical wrong answers to e01_linear, one mistake each."""

WRONG = [
    {
        "mistake": "The weight is not transposed in dx: dy is multiplied by weight as in the forward pass.",
        "gradients": ["dx"],
        "code": '''\
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
    dx = dy @ weight
    dweight = rows(x).T @ rows(dy)
    dbias = rows(dy).sum(axis=0)
    return dx, dweight, dbias if has_bias else None
''',
    },
    {
        "mistake": (
            "In dx the weight is reshaped to (out, in) instead of transposed: the shape fits, but the entries are"
            " mixed up."
        ),
        "gradients": ["dx"],
        "code": '''\
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
    n_in, n_out = weight.shape
    dx = np.matmul(dy, weight.reshape(n_out, n_in))
    x2, dy2 = rows(x), rows(dy)
    dweight = np.matmul(x2.T, dy2)
    dbias = np.sum(dy2, 0)
    return dx, dweight, dbias if has_bias else None
''',
    },
    {
        "mistake": (
            "dbias is summed over the first axis only, so with a batch the tokens (or sequences) are not all summed."
        ),
        "gradients": ["dbias"],
        "code": '''\
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
    dx = dy @ weight.T  # shape (..., in)
    dweight = rows(x).T @ rows(dy)  # shape (in, out)
    dbias = dy.sum(axis=0)  # shape (out,)
    return dx, dweight, dbias if has_bias else None
''',
    },
    {
        "mistake": "dbias is the mean over the tokens instead of the sum.",
        "gradients": ["dbias"],
        "code": '''\
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
    flat = rows(dy)
    dx = np.einsum("nj,ij->ni", flat, weight).reshape(x.shape)
    dweight = np.einsum("ni,nj->ij", rows(x), flat)
    dbias = np.einsum("nj->j", flat) / len(flat)
    return dx, dweight, dbias if has_bias else None
''',
    },
    {
        "mistake": (
            "The loop over the tokens assigns dweight (=) instead of adding to it (+=), so only the last token counts."
        ),
        "gradients": ["dweight"],
        "code": '''\
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
    dx = np.zeros_like(rows(x))
    dweight = np.zeros_like(weight)
    dbias = np.zeros_like(weight[0])
    for n, (x_n, dy_n) in enumerate(zip(rows(x), rows(dy))):
        dx[n] = weight @ dy_n
        dweight = np.outer(x_n, dy_n)
        dbias += dy_n
    dx = dx.reshape(x.shape)
    return dx, dweight, dbias if has_bias else None
''',
    },
    {
        "mistake": "dweight comes out transposed, (out, in): the transpose is on dy instead of on x.",
        "gradients": ["dweight"],
        "code": '''\
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
    X = rows(x)
    G = rows(dy)
    dx = (G @ weight.T).reshape(x.shape)
    dweight = G.T @ X
    dbias = G.sum(0)
    return dx, dweight, dbias if has_bias else None
''',
    },
]
