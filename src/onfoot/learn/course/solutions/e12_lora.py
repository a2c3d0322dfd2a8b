"""Exercise 12: LoRA. The page is e12_lora.md; check with: onfoot learn check 12"""

import numpy as np
from e01_linear import linear_forward, rows


def lora_forward(x, down, up, scale):
    """y = scale · x down up. Given: x (..., in), down (in, r), up (r, out), scale a number, y (..., out)."""
    low = x @ down  # (..., r)
    return scale * (low @ up), (x, down, up, scale, low)


def lora_backward(dy, saved):
    """The gradients of x, down and up, from dy (..., out), the gradient of y."""
    x, down, up, scale, low = saved
    dlow = scale * (dy @ up.T)  # (..., r)
    dx = dlow @ down.T  # (..., in)
    ddown = rows(x).T @ rows(dlow)  # (in, r)
    dup = scale * (rows(low).T @ rows(dy))  # (r, out)
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none."""
    weight, s_lora = saved
    dx_lora, ddown, dup = lora_backward(dy, s_lora)
    frozen = (rows(dy) @ weight.T).reshape(*dy.shape[:-1], weight.shape[0])  # (..., in)
    return frozen + dx_lora, ddown, dup
