"""Exercise 18: AdamW. The page is e18_adamw.md; check with: onfoot learn check 18"""

import math

import numpy as np


def correction(beta, steps):
    """1 − beta**steps, without losing digits for beta close to 1. Given."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def adamw_update(p, m, v, g, lr, betas, eps, decay, steps):
    """One update of a parameter p with its gradient g, as new arrays: p, m and v.

    m and v are the running means of g and g², of p's shape; steps counts from 1; betas is (beta1, beta2). The arrays
    that you get must not be changed.
    """
    beta1, beta2 = betas
    new_m = m * beta1 + (1 - beta1) * g
    new_v = v * beta2 + (1 - beta2) * (g * g)
    spread = np.sqrt(new_v) * (1 / math.sqrt(correction(beta2, steps))) + eps  # √v̂ + eps
    new_p = p * (1 - lr * decay) - (lr / correction(beta1, steps)) * new_m / spread
    return new_p, new_m, new_v
