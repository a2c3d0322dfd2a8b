"""Six typical wrong answers to e12_lora: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "The scale is missing in the gradient of up.",
        "gradients": ["dup"],
        "function": "lora_backward",
        "code": '''\
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
    dlow = scale * (dy @ up.T)  # (..., r)
    dx = dlow @ down.T
    ddown = rows(x).T @ rows(dlow)
    dup = rows(low).T @ rows(dy)
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    dx, ddown, dup = lora_backward(dy, s_lora)
    dx = dx + dy @ weight.T
    return dx, ddown, dup
''',
    },
    {
        "mistake": "The scale is applied twice in the gradient of down.",
        "gradients": ["ddown"],
        "function": "lora_backward",
        "code": '''\
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
    g = dy * scale
    g_low = g @ up.T
    dx = g_low @ down.T
    ddown = scale * np.einsum("ni,nr->ir", rows(x), rows(g_low))
    dup = np.einsum("nr,no->ro", rows(low), rows(g))
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    dx, ddown, dup = lora_backward(dy, s_lora)
    dx += np.einsum("...o,io->...i", dy, weight)
    return dx, ddown, dup
''',
    },
    {
        "mistake": "The frozen layer is left out entirely: x gets only the gradient of the adapter.",
        "gradients": ["dx"],
        "function": "lora_linear_backward",
        "code": '''\
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
    dy_up = dy @ up.T
    dx = scale * (dy_up @ down.T)
    ddown = scale * (rows(x).T @ rows(dy_up))
    dup = scale * (rows(low).T @ rows(dy))
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    dx, ddown, dup = lora_backward(dy, s_lora)
    # weight is frozen: nothing more to do
    return dx, ddown, dup
''',
    },
    {
        "mistake": (
            "The gradient of x through the frozen weight replaces the one through the adapter instead of being added."
        ),
        "gradients": ["dx"],
        "function": "lora_linear_backward",
        "code": '''\
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
    flat_x, flat_low, flat_dy = rows(x), rows(low), scale * rows(dy)
    flat_dlow = flat_dy @ up.T
    dx = (flat_dlow @ down.T).reshape(x.shape)
    ddown = flat_x.T @ flat_dlow
    dup = flat_low.T @ flat_dy
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    dx, ddown, dup = lora_backward(dy, s_lora)
    dx = dy @ weight.T
    return dx, ddown, dup
''',
    },
    {
        "mistake": (
            "down is reshaped to (r, in) instead of transposed: the shape is right, but the entries are at the "
            "wrong places."
        ),
        "gradients": ["dx"],
        "function": "lora_backward",
        "code": '''\
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
    rank = down.shape[1]
    dlow = scale * np.matmul(dy, np.transpose(up))
    dx = np.matmul(dlow, down.reshape(rank, -1))
    ddown = np.matmul(rows(x).T, dlow.reshape(-1, rank))
    dup = scale * np.matmul(low.reshape(-1, rank).T, rows(dy))
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    d_adapter, ddown, dup = lora_backward(dy, s_lora)
    dx = np.matmul(dy, np.transpose(weight)) + d_adapter
    return dx, ddown, dup
''',
    },
    {
        "mistake": "The gradient of up is not summed over the batch: it keeps the leading axis when x has three axes.",
        "gradients": ["dup"],
        "function": "lora_backward",
        "code": '''\
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
    dlow = scale * dy @ up.T
    dx = dlow @ down.T
    ddown = rows(x).T @ rows(dlow)
    dup = scale * np.swapaxes(low, -1, -2) @ dy
    return dx, ddown, dup


def lora_linear_forward(x, weight, bias, down, up, scale):
    """y = x weight + bias + scale · x down up: a frozen linear layer and its adapter. Given: weight (in, out)."""
    y, _ = linear_forward(x, weight, bias)
    added, s_lora = lora_forward(x, down, up, scale)
    return y + added, (weight, s_lora)


def lora_linear_backward(dy, saved):
    """The gradients of x, down and up; weight and bias are frozen and need none. To write."""
    weight, s_lora = saved
    dx_lora, ddown, dup = lora_backward(dy, s_lora)
    dx_frozen = dy @ weight.T
    return dx_frozen + dx_lora, ddown, dup
''',
    },
]
