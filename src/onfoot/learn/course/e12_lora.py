"""Exercise 12: LoRA. The page is e12_lora.md; check with: onfoot learn check 12"""

import numpy as np
from e01_linear import linear_forward, rows


def lora_forward(x, down, up, scale):
    """y = scale · x down up. Given: x (..., in), down (in, r), up (r, out), scale a number, y (..., out)."""
    low = x @ down  # (..., r)
    return scale * (low @ up), (x, down, up, scale, low)


def lora_backward(dy, saved):
    """The gradients of x, down and up, from dy (..., out), the gradient of y. To write."""
    x, down, up, scale, low = saved
    dx = None  # shape (..., in)
    ddown = None  # shape (in, r)
    dup = None  # shape (r, out)
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    dx = None  # shape (..., in)
    ddown = None  # shape (in, r)
    dup = None  # shape (r, out)
    return dx, ddown, dup
