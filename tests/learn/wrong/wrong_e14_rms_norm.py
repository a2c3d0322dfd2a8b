"""Six typical wrong answers to e14_rms_norm: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "dx is computed from dy itself: the weight that dy must first be multiplied by is missing.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y. To write."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    g = dy
    dx = inverse * (g - normed * (g * normed).mean(axis=-1, keepdims=True))
    dweight = (dy * normed).reshape(-1, dy.shape[-1]).sum(axis=0)
    return dx, dweight
''',
    },
    {
        "mistake": "r is treated as a constant: the term for the change of r with x is missing in dx.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y. To write."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    dnormed = dy * weight
    dx = dnormed * inverse
    axes = tuple(range(dy.ndim - 1))
    dweight = np.sum(dy * normed, axis=axes)
    return dx, dweight
''',
    },
    {
        "mistake": (
            "In dx the products along the row are summed instead of averaged: a factor C too much in the second term."
        ),
        "gradients": ["dx"],
        "code": '''\
"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y. To write."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    g = weight * dy
    along = np.einsum("...c,...c->...", g, normed)[..., None]
    dx = (g - along * normed) * inverse
    dweight = np.einsum("nc,nc->c", dy.reshape(-1, len(weight)), normed.reshape(-1, len(weight)))
    return dx, dweight
''',
    },
    {
        "mistake": "The mean of g is subtracted in dx as in layer norm, though RMS norm subtracts no mean.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y. To write."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    g = dy * weight
    dot = (g * normed).mean(-1, keepdims=True)
    dx = inverse * (g - g.mean(-1, keepdims=True) - normed * dot)
    dweight = (dy * normed).sum(tuple(range(dy.ndim - 1)))
    return dx, dweight
''',
    },
    {
        "mistake": "dweight is just the sum of dy, as for a bias: the factor normed is forgotten.",
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y. To write."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    C = dy.shape[-1]
    flat_dy, flat_normed, flat_inverse = dy.reshape(-1, C), normed.reshape(-1, C), inverse.reshape(-1, 1)
    dweight = np.zeros_like(weight)
    for row, n in zip(flat_dy, flat_normed):
        dweight += row
    g = flat_dy * weight
    dx = flat_inverse * (g - flat_normed * (g * flat_normed).mean(axis=1, keepdims=True))
    dx = dx.reshape(dy.shape)
    return dx, dweight
''',
    },
    {
        "mistake": (
            "dweight is summed over the first axis only, so with (batch, tokens, features) the sum over the "
            "tokens is missing."
        ),
        "gradients": ["dweight"],
        "code": '''\
"""Exercise 14: RMS norm. The page is e14_rms_norm.md; check with: onfoot learn check 14"""

import numpy as np


def rms_norm_forward(x, weight, eps=1e-6):
    """y = normed * weight with normed = x/√(mean x² + eps), over each row. Given: x (..., C), weight (C,)."""
    inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # 1/r, (..., 1)
    normed = x * inverse  # (..., C)
    return normed * weight, (normed, inverse, weight)


def rms_norm_backward(dy, saved):
    """The gradients of x and weight, from dy (..., C), the gradient of y. To write."""
    normed, inverse, weight = saved  # (..., C), (..., 1), (C,)
    def row_mean(a):
        return a.mean(axis=-1, keepdims=True)

    g = dy * weight
    dx = g * inverse - normed * inverse * row_mean(g * normed)
    dweight = (dy * normed).sum(axis=0)
    return dx, dweight
''',
    },
]
