"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    dnormed = dy * weight  # (..., C)
    along = (normed * dnormed).mean(axis=-1, keepdims=True)
    dx = (dnormed - normed * along) * inverse
    dweight = (normed * dy).reshape(-1, dy.shape[-1]).sum(axis=0)  # (C,)
    return dx, dweight
