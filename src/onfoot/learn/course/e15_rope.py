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
    dx = None  # shape (..., T, D)
    return dx
