"""Six typical wrong answers to e16_swiglu: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "The slope of silu is taken to be sigmoid(gate): the second term of the product rule is forgotten.",
        "gradients": ["dgate"],
        "code": '''\
"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y. To write."""
    gate, up = saved
    s = sigmoid(gate)
    dup = dy * gate * s
    dgate = dy * up * s
    return dgate, dup
''',
    },
    {
        "mistake": "The derivative of sigmoid is used in place of that of silu.",
        "gradients": ["dgate"],
        "code": '''\
"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y. To write."""
    gate, up = saved
    def slope(g):
        sig = sigmoid(g)
        return sig * (1 - sig)

    dgate = dy * up * slope(gate)
    dup = dy * (gate * sigmoid(gate))
    return dgate, dup
''',
    },
    {
        "mistake": "The factor up is missing in dgate.",
        "gradients": ["dgate"],
        "code": '''\
"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y. To write."""
    gate, up = saved
    sig = sigmoid(gate)
    silu = gate * sig
    dsilu = dy
    dgate = dsilu * (sig * (1 + gate * (1 - sig)))
    dup = dy * silu
    return dgate, dup
''',
    },
    {
        "mistake": "dup is dy · sigmoid(gate): the factor gate of silu is forgotten, as if it were a plain sigmoid.",
        "gradients": ["dup"],
        "code": '''\
"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y. To write."""
    gate, up = saved
    sg = sigmoid(gate)
    d_silu = sg * (1.0 + gate - gate * sg)
    dgate = np.multiply(np.multiply(dy, up), d_silu)
    dup = np.multiply(dy, sg)
    return dgate, dup
''',
    },
    {
        "mistake": "The sign of the second term in the slope of silu is wrong.",
        "gradients": ["dgate"],
        "code": '''\
"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y. To write."""
    gate, up = saved
    s = sigmoid(gate)
    dgate = dy * up * s * (1 - gate * (1 - s))
    dup = dy * s * gate
    return dgate, dup
''',
    },
    {
        "mistake": "The slope of sigmoid is taken as 1 − σ², which is tanh's, instead of σ (1 − σ).",
        "gradients": ["dgate"],
        "code": '''\
"""Exercise 16: SwiGLU. The page is e16_swiglu.md; check with: onfoot learn check 16"""

import numpy as np


def sigmoid(x):
    """1/(1 + exp(−x)), written with tanh, which cannot overflow. Given."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def swiglu_forward(gate, up):
    """y = gate · sigmoid(gate) · up, entry by entry. Given: gate, up (..., C)."""
    return gate * sigmoid(gate) * up, (gate, up)


def swiglu_backward(dy, saved):
    """The gradients of gate and up, from dy (..., C), the gradient of y. To write."""
    gate, up = saved
    sig = sigmoid(gate)
    dsig = 1 - sig**2  # the derivative of sigmoid
    dproduct = dy * up  # the gradient of gate * sigmoid(gate)
    dgate = dproduct * sig + dproduct * gate * dsig
    dup = dy * gate * sig
    return dgate, dup
''',
    },
]
