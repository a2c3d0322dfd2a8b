"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x."""
    (x,) = saved
    return np.where(x <= 0, 0, dy)


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x."""
    (x,) = saved
    x2 = x * x
    tanh = np.tanh(ROOT_2_OVER_PI * (x + CUBIC * (x2 * x)))
    du = ROOT_2_OVER_PI * (1 + 3 * CUBIC * x2)
    return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * du)
