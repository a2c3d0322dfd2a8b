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
    new_p = None  # shape of p
    new_m = None  # shape of p
    new_v = None  # shape of p
    return new_p, new_m, new_v
