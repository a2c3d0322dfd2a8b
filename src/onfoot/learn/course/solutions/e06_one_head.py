"""Exercise 6: one attention head. The page is e06_one_head.md; check with: onfoot learn check 6"""

import numpy as np
from e03_cross_entropy import softmax, softmax_gradient


def transposed(x):
    """(..., A, B) -> (..., B, A): the transpose of each matrix."""
    return np.swapaxes(x, -1, -2)


def one_head_forward(q, k, v):
    """y = softmax(q kᵗ/√D) v. Given: q (..., Tq, D), k (..., Tk, D), v (..., Tk, Dv), y (..., Tq, Dv)."""
    raw = q @ transposed(k)  # (..., Tq, Tk)
    scores = raw / float(np.sqrt(q.shape[-1]))
    rho = softmax(scores)  # (..., Tq, Tk): row i has the weights of query i
    return rho @ v, (q, k, v, rho)


def one_head_backward(dy, saved):
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y."""
    q, k, v, rho = saved
    drho = dy @ transposed(v)  # (..., Tq, Tk)
    dv = transposed(rho) @ dy  # (..., Tk, Dv)
    dscores = softmax_gradient(drho, rho)
    draw = dscores / float(np.sqrt(q.shape[-1]))
    dq = draw @ k  # (..., Tq, D)
    dk = transposed(draw) @ q  # (..., Tk, D)
    return dq, dk, dv
