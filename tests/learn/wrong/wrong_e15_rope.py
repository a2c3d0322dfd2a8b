"""Six typical wrong answers to e15_rope: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": (
            "The gradient is turned forwards once more: the matrix R is used where its transpose (the opposite "
            "angle) is needed."
        ),
        "gradients": ["dx"],
        "code": '''\
"""Exercise 15: rotary positions (RoPE). The page is e15_rope.md; check with: onfoot learn check 15"""

import numpy as np


def angles(positions, width, theta=10000.0):
    """cos and sin of position · theta^(−2i/D), (T, D/2), for i = 0 … D/2 − 1. Given: positions (T,), width D."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """Each pair of features (i, i + D/2) rotated by its angle. Given: x (..., T, D), cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # (..., T, D/2)
    y = np.empty_like(x)
    y[..., :half] = a * cos - b * sin
    y[..., half:] = a * sin + b * cos
    return y, (cos, sin)


def rope_backward(dy, saved):
    """The gradient of x, from dy (..., T, D), the gradient of y; cos and sin are constants. To write."""
    cos, sin = saved  # (T, D/2)
    dx, _ = rope_forward(dy, cos, sin)
    return dx
''',
    },
    {
        "mistake": "One sign is wrong: the second half adds sin times the first half of dy instead of subtracting it.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 15: rotary positions (RoPE). The page is e15_rope.md; check with: onfoot learn check 15"""

import numpy as np


def angles(positions, width, theta=10000.0):
    """cos and sin of position · theta^(−2i/D), (T, D/2), for i = 0 … D/2 − 1. Given: positions (T,), width D."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """Each pair of features (i, i + D/2) rotated by its angle. Given: x (..., T, D), cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # (..., T, D/2)
    y = np.empty_like(x)
    y[..., :half] = a * cos - b * sin
    y[..., half:] = a * sin + b * cos
    return y, (cos, sin)


def rope_backward(dy, saved):
    """The gradient of x, from dy (..., T, D), the gradient of y; cos and sin are constants. To write."""
    cos, sin = saved  # (T, D/2)
    half = dy.shape[-1] // 2
    da, db = dy[..., :half], dy[..., half:]
    dx = np.empty_like(dy)
    dx[..., :half] = da * cos + db * sin
    dx[..., half:] = db * cos + da * sin
    return dx
''',
    },
    {
        "mistake": "The pairs are taken as neighbours (2i, 2i + 1), but the forward pass pairs feature i with i + D/2.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 15: rotary positions (RoPE). The page is e15_rope.md; check with: onfoot learn check 15"""

import numpy as np


def angles(positions, width, theta=10000.0):
    """cos and sin of position · theta^(−2i/D), (T, D/2), for i = 0 … D/2 − 1. Given: positions (T,), width D."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """Each pair of features (i, i + D/2) rotated by its angle. Given: x (..., T, D), cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # (..., T, D/2)
    y = np.empty_like(x)
    y[..., :half] = a * cos - b * sin
    y[..., half:] = a * sin + b * cos
    return y, (cos, sin)


def rope_backward(dy, saved):
    """The gradient of x, from dy (..., T, D), the gradient of y; cos and sin are constants. To write."""
    cos, sin = saved  # (T, D/2)
    half = cos.shape[-1]
    first, second = slice(0, None, 2), slice(1, None, 2)
    u, w = dy[..., first], dy[..., second]
    dx = np.zeros_like(dy)
    dx[..., first] = cos * u + sin * w
    dx[..., second] = cos * w - sin * u
    return dx
''',
    },
    {
        "mistake": "The two halves are joined in the wrong order: the gradient of b stands first and that of a second.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 15: rotary positions (RoPE). The page is e15_rope.md; check with: onfoot learn check 15"""

import numpy as np


def angles(positions, width, theta=10000.0):
    """cos and sin of position · theta^(−2i/D), (T, D/2), for i = 0 … D/2 − 1. Given: positions (T,), width D."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """Each pair of features (i, i + D/2) rotated by its angle. Given: x (..., T, D), cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # (..., T, D/2)
    y = np.empty_like(x)
    y[..., :half] = a * cos - b * sin
    y[..., half:] = a * sin + b * cos
    return y, (cos, sin)


def rope_backward(dy, saved):
    """The gradient of x, from dy (..., T, D), the gradient of y; cos and sin are constants. To write."""
    cos, sin = saved  # (T, D/2)
    dy_a, dy_b = np.split(dy, 2, axis=-1)
    da = dy_a * cos + dy_b * sin
    db = -dy_a * sin + dy_b * cos
    dx = np.concatenate([db, da], axis=-1)
    return dx
''',
    },
    {
        "mistake": (
            "Only the cos terms are there: that each of a and b also acts on the other coordinate, through sin, "
            "is forgotten."
        ),
        "gradients": ["dx"],
        "code": '''\
"""Exercise 15: rotary positions (RoPE). The page is e15_rope.md; check with: onfoot learn check 15"""

import numpy as np


def angles(positions, width, theta=10000.0):
    """cos and sin of position · theta^(−2i/D), (T, D/2), for i = 0 … D/2 − 1. Given: positions (T,), width D."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """Each pair of features (i, i + D/2) rotated by its angle. Given: x (..., T, D), cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # (..., T, D/2)
    y = np.empty_like(x)
    y[..., :half] = a * cos - b * sin
    y[..., half:] = a * sin + b * cos
    return y, (cos, sin)


def rope_backward(dy, saved):
    """The gradient of x, from dy (..., T, D), the gradient of y; cos and sin are constants. To write."""
    cos, sin = saved  # (T, D/2)
    n = dy.shape[-1] // 2
    top, bottom = dy[..., :n], dy[..., n:]
    dx = np.concatenate((top * cos, bottom * cos), axis=-1)
    return dx
''',
    },
    {
        "mistake": (
            "The second half is computed from a first half that has already been overwritten (a view of dx, not of dy)."
        ),
        "gradients": ["dx"],
        "code": '''\
"""Exercise 15: rotary positions (RoPE). The page is e15_rope.md; check with: onfoot learn check 15"""

import numpy as np


def angles(positions, width, theta=10000.0):
    """cos and sin of position · theta^(−2i/D), (T, D/2), for i = 0 … D/2 − 1. Given: positions (T,), width D."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """Each pair of features (i, i + D/2) rotated by its angle. Given: x (..., T, D), cos and sin (T, D/2)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]  # (..., T, D/2)
    y = np.empty_like(x)
    y[..., :half] = a * cos - b * sin
    y[..., half:] = a * sin + b * cos
    return y, (cos, sin)


def rope_backward(dy, saved):
    """The gradient of x, from dy (..., T, D), the gradient of y; cos and sin are constants. To write."""
    cos, sin = saved  # (T, D/2)
    half = dy.shape[-1] // 2
    dx = dy.copy()
    a, b = dx[..., :half], dx[..., half:]
    dx[..., :half] = a * cos + b * sin
    dx[..., half:] = b * cos - a * sin
    return dx
''',
    },
]
