"""Six typical wrong answers to e18_adamw: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "eps is added under the root instead of to the root.",
        "gradients": ["new_p"],
        "code": '''\
"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v. To write.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    new_m = beta1 * m + (1 - beta1) * g
    new_v = beta2 * v + (1 - beta2) * g * g
    m_hat = new_m / correction(beta1, steps)
    v_hat = new_v / correction(beta2, steps)
    new_p = p * (1 - lr * decay) - lr * m_hat / np.sqrt(v_hat + eps)
    return new_p, new_m, new_v
''',
    },
    {
        "mistake": "The bias correction is forgotten for v (it is applied to m only).",
        "gradients": ["new_p"],
        "code": '''\
"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v. To write.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    new_m = m + (1 - beta1) * (g - m)
    new_v = v + (1 - beta2) * (g**2 - v)
    first = new_m / correction(beta1, steps)
    second = new_v
    shrunk = p - lr * decay * p
    new_p = shrunk - lr * first / (second**0.5 + eps)
    return new_p, new_m, new_v
''',
    },
    {
        "mistake": "Weight decay is added to the gradient and goes through m and v, instead of shrinking p on its own.",
        "gradients": ["new_p", "new_m", "new_v"],
        "code": '''\
"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v. To write.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    g = g + decay * p
    mean = beta1 * m + (1 - beta1) * g
    square = beta2 * v + (1 - beta2) * g**2
    step = (mean / correction(beta1, steps)) / (np.sqrt(square / correction(beta2, steps)) + eps)
    return p - lr * step, mean, square
''',
    },
    {
        "mistake": (
            "The corrected means are returned as the new m and v; the next step must go on with the uncorrected ones."
        ),
        "gradients": ["new_m", "new_v"],
        "code": '''\
"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v. To write.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    new_m = beta1 * m + (1.0 - beta1) * g
    new_v = beta2 * v + (1.0 - beta2) * np.square(g)
    mh = new_m / correction(beta1, steps)
    vh = new_v / correction(beta2, steps)
    new_p = p * (1.0 - lr * decay)
    new_p = new_p - lr * mh / (np.sqrt(vh) + eps)
    return new_p, mh, vh
''',
    },
    {
        "mistake": "The correction of v is applied after the root instead of before it.",
        "gradients": ["new_p"],
        "code": '''\
"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v. To write.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    c1, c2 = correction(beta1, steps), correction(beta2, steps)
    new_m = (1 - beta1) * g + beta1 * m
    new_v = (1 - beta2) * g * g + beta2 * v
    denominator = np.sqrt(new_v) / c2 + eps
    new_p = (1 - lr * decay) * p - (lr / c1) * new_m / denominator
    return new_p, new_m, new_v
''',
    },
    {
        "mistake": "Weight decay shrinks p by the factor 1 − decay: the learning rate is missing in it.",
        "gradients": ["new_p"],
        "code": '''\
"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v. To write.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    def running(old, new, beta):
        return beta * old + (1 - beta) * new

    new_m = running(m, g, beta1)
    new_v = running(v, g * g, beta2)
    update = new_m / correction(beta1, steps) / (np.sqrt(new_v / correction(beta2, steps)) + eps)
    new_p = p * (1 - decay)
    new_p -= lr * update
    return new_p, new_m, new_v
''',
    },
]
