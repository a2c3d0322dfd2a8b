"""Typical wrong answers to e05_layer_norm, one mistake each."""

WRONG = [
    {
        "mistake": "dx forgets the weight: dy is taken as the gradient of normed.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 5: layer norm. The page is e05_layer_norm.md; check with: onfoot learn check 5"""

import numpy as np


def layer_norm_forward(x, weight, bias, eps=1e-5):
    """y = normed * weight + bias, normed with mean 0 and variance 1 per row. Given: x (..., C), weight, bias (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)  # (..., C)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # (..., 1): divided by C, not by C − 1
    rstd = 1 / np.sqrt(variance + eps)  # 1/σ, (..., 1)
    normed = centred * rstd  # (..., C)
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y. To write."""
    normed, rstd, weight = saved  # (..., C), (..., 1), (C,)
    m1 = dy.mean(axis=-1, keepdims=True)
    m2 = (dy * normed).mean(axis=-1, keepdims=True)
    dx = rstd * (dy - m1 - normed * m2)  # shape (..., C)
    leading = tuple(range(dy.ndim - 1))
    dweight = (dy * normed).sum(axis=leading)  # shape (C,)
    dbias = dy.sum(axis=leading)  # shape (C,)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "dx forgets the way through σ: the term normed · mean(g normed) is missing.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 5: layer norm. The page is e05_layer_norm.md; check with: onfoot learn check 5"""

import numpy as np


def layer_norm_forward(x, weight, bias, eps=1e-5):
    """y = normed * weight + bias, normed with mean 0 and variance 1 per row. Given: x (..., C), weight, bias (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)  # (..., C)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # (..., 1): divided by C, not by C − 1
    rstd = 1 / np.sqrt(variance + eps)  # 1/σ, (..., 1)
    normed = centred * rstd  # (..., C)
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y. To write."""
    normed, rstd, weight = saved
    g = dy * weight
    dx = (g - g.mean(-1, keepdims=True)) * rstd
    C = weight.size
    dweight = (dy * normed).reshape(-1, C).sum(0)
    dbias = dy.reshape(-1, C).sum(0)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "dx forgets the way through the mean: the term mean(g) is missing.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 5: layer norm. The page is e05_layer_norm.md; check with: onfoot learn check 5"""

import numpy as np


def layer_norm_forward(x, weight, bias, eps=1e-5):
    """y = normed * weight + bias, normed with mean 0 and variance 1 per row. Given: x (..., C), weight, bias (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)  # (..., C)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # (..., 1): divided by C, not by C − 1
    rstd = 1 / np.sqrt(variance + eps)  # 1/σ, (..., 1)
    normed = centred * rstd  # (..., C)
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y. To write."""
    normed, rstd, weight = saved
    axes = tuple(range(dy.ndim - 1))
    dbias = np.sum(dy, axis=axes)
    dweight = np.sum(dy * normed, axis=axes)
    dnormed = dy * weight
    projection = np.mean(dnormed * normed, axis=-1, keepdims=True)
    dx = rstd * (dnormed - projection * normed)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "In dx the term through σ has the sum over the features, not the mean: it is C times too large.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 5: layer norm. The page is e05_layer_norm.md; check with: onfoot learn check 5"""

import numpy as np


def layer_norm_forward(x, weight, bias, eps=1e-5):
    """y = normed * weight + bias, normed with mean 0 and variance 1 per row. Given: x (..., C), weight, bias (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)  # (..., C)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # (..., 1): divided by C, not by C − 1
    rstd = 1 / np.sqrt(variance + eps)  # 1/σ, (..., 1)
    normed = centred * rstd  # (..., C)
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y. To write."""
    normed, rstd, weight = saved
    c = normed.shape[-1]
    g = dy * weight
    inner = np.einsum("...c,...c->...", g, normed)[..., None]
    dx = rstd * (g - g.mean(axis=-1, keepdims=True) - normed * inner)
    dweight = np.einsum("nc,nc->c", dy.reshape(-1, c), normed.reshape(-1, c))
    dbias = dy.reshape(-1, c).sum(axis=0)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "dweight is computed from g = dy · weight instead of from dy.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 5: layer norm. The page is e05_layer_norm.md; check with: onfoot learn check 5"""

import numpy as np


def layer_norm_forward(x, weight, bias, eps=1e-5):
    """y = normed * weight + bias, normed with mean 0 and variance 1 per row. Given: x (..., C), weight, bias (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)  # (..., C)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # (..., 1): divided by C, not by C − 1
    rstd = 1 / np.sqrt(variance + eps)  # 1/σ, (..., 1)
    normed = centred * rstd  # (..., C)
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y. To write."""
    normed, rstd, weight = saved
    C = normed.shape[-1]
    g = dy * weight
    dx = g - np.mean(g, -1, keepdims=True) - normed * np.mean(g * normed, -1, keepdims=True)
    dx = dx * rstd
    dweight = (g * normed).reshape(-1, C).sum(axis=0)
    dbias = dy.reshape(-1, C).sum(axis=0)
    return dx, dweight, dbias
''',
    },
    {
        "mistake": "dweight is summed over the first axis only: with a batch the tokens are not all summed.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 5: layer norm. The page is e05_layer_norm.md; check with: onfoot learn check 5"""

import numpy as np


def layer_norm_forward(x, weight, bias, eps=1e-5):
    """y = normed * weight + bias, normed with mean 0 and variance 1 per row. Given: x (..., C), weight, bias (C,)."""
    centred = x - x.mean(axis=-1, keepdims=True)  # (..., C)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # (..., 1): divided by C, not by C − 1
    rstd = 1 / np.sqrt(variance + eps)  # 1/σ, (..., 1)
    normed = centred * rstd  # (..., C)
    return normed * weight + bias, (normed, rstd, weight)


def layer_norm_backward(dy, saved):
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y. To write."""
    normed, rstd, weight = saved
    g = weight * dy
    mean = lambda a: a.mean(axis=-1, keepdims=True)
    dx = rstd * (g - mean(g) - normed * mean(g * normed))
    dweight = (normed * dy).sum(axis=0)
    dbias = dy.reshape(-1, dy.shape[-1]).sum(axis=0)
    return dx, dweight, dbias
''',
    },
]
