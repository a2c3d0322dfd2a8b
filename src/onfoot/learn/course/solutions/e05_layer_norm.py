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
    """The gradients of x, weight and bias, from dy (..., C), the gradient of y."""
    normed, rstd, weight = saved  # (..., C), (..., 1), (C,)
    dnormed = dy * weight  # (..., C)
    mean = dnormed.mean(axis=-1, keepdims=True)
    along = (normed * dnormed).mean(axis=-1, keepdims=True)
    dx = (dnormed - mean - normed * along) * rstd
    width = dy.shape[-1]
    dweight = (normed * dy).reshape(-1, width).sum(axis=0)  # (C,)
    dbias = dy.reshape(-1, width).sum(axis=0)  # (C,)
    return dx, dweight, dbias
