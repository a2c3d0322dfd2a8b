"""Typical wrong answers to e02_activation, one mistake each."""

WRONG = [
    {
        "mistake": "relu_backward returns only the slope, 0 or 1: dy is forgotten (the chain rule).",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    dx = (x > 0).astype(x.dtype)
    return dx


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    t = np.tanh(ROOT_2_OVER_PI * (x + CUBIC * x**3))
    du = ROOT_2_OVER_PI * (1 + 3 * CUBIC * x**2)
    dx = dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * du)
    return dx
''',
    },
    {
        "mistake": "relu_backward masks with the sign of dy instead of the sign of x.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    dx = np.maximum(dy, 0)
    return dx


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    th = np.tanh(u)
    left = 0.5 * (1 + th)
    right = 0.5 * x * (1 - th * th) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * x * x)
    dx = (left + right) * dy
    return dx
''',
    },
    {
        "mistake": "gelu_tanh_backward forgets the inner derivative du/dx of tanh u (the chain rule).",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    dx = dy * (x > 0)
    return dx


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    u = ROOT_2_OVER_PI * (x + CUBIC * x**3)
    slope = (1 + np.tanh(u)) / 2 + x / 2 * (1 - np.tanh(u) ** 2)
    dx = dy * slope
    return dx
''',
    },
    {
        "mistake": "gelu_tanh_backward differentiates x³ to x²: the factor 3 is missing in du/dx.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    dx = dy.copy()
    dx[x <= 0] = 0
    return dx


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    u = ROOT_2_OVER_PI * (x + CUBIC * x**3)
    du = ROOT_2_OVER_PI * (1 + CUBIC * x**2)
    t = np.tanh(u)
    dx = dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * du)
    return dx
''',
    },
    {
        "mistake": "gelu_tanh_backward takes 1 − tanh for the derivative of tanh: the square is missing.",
        "gradients": ["dx"],
        "code": '''\
"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    dx = np.where(x > 0, dy, 0)
    return dx


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    a, b = ROOT_2_OVER_PI, CUBIC
    tanh = np.tanh(a * x + a * b * x**3)
    dtanh = (1 - tanh) * (a + 3 * a * b * x**2)
    dx = 0.5 * dy * (1 + tanh + x * dtanh)
    return dx
''',
    },
    {
        "mistake": (
            "gelu_tanh_backward forgets one half of the product rule: x/2 · (tanh u)' is there, 1/2 · (1 + tanh "
            "u) is not."
        ),
        "gradients": ["dx"],
        "code": '''\
"""Exercise 2: ReLU and GELU. The page is e02_activation.md; check with: onfoot learn check 2"""

import numpy as np

ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))
CUBIC = 0.044715  # the coefficient of x³


def relu_forward(x):
    """y = max(x, 0), entry by entry. Given."""
    return np.where(x <= 0, 0, x), (x,)


def relu_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    mask = x > 0
    dx = mask * dy
    return dx


def gelu_tanh_forward(x):
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), entry by entry. Given."""
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + np.tanh(u)), (x,)


def gelu_tanh_backward(dy, saved):
    """The gradient of x, from dy, the gradient of y; both have the shape of x. To write."""
    (x,) = saved
    t = np.tanh(ROOT_2_OVER_PI * (x + CUBIC * x**3))
    dt = (1 - t * t) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * x**2)
    dx = dy * 0.5 * x * dt
    return dx
''',
    },
]
