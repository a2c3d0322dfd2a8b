"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y."""
    gate, up = saved
    s = sigmoid(gate)
    silu = gate * s
    dgate = dy * up * (s + silu * (1 - s))
    dup = dy * silu
    return dgate, dup
