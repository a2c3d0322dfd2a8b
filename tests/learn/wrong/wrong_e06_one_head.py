"""Typical wrong answers to e06_one_head, one mistake each."""

WRONG = [
    {
        "mistake": "The scale 1/√D is forgotten in the backward pass.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    dv = transposed(rho) @ dy
    drho = dy @ transposed(v)
    dscores = softmax_gradient(drho, rho)
    dq = dscores @ k
    dk = transposed(dscores) @ q
    return dq, dk, dv
''',
    },
    {
        "mistake": "The scale is applied to dq only; dk is made from the unscaled gradient of the scores.",
        "gradients": ["dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    scale = 1 / float(np.sqrt(q.shape[-1]))
    dscores = softmax_gradient(dy @ transposed(v), rho)
    dq = scale * dscores @ k
    dk = transposed(dscores) @ q
    dv = transposed(rho) @ dy
    return dq, dk, dv
''',
    },
    {
        "mistake": "The scale is taken from the width of the values, √Dv, instead of the width of queries and keys.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    d = v.shape[-1]
    drho = np.einsum("...id,...jd->...ij", dy, v)
    draw = softmax_gradient(drho, rho) / d**0.5
    dq = np.einsum("...ij,...jc->...ic", draw, k)
    dk = np.einsum("...ij,...ic->...jc", draw, q)
    dv = np.einsum("...ij,...id->...jd", rho, dy)
    return dq, dk, dv
''',
    },
    {
        "mistake": "Softmax is skipped: drho is taken as the gradient of the scores.",
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    dv = transposed(rho) @ dy
    dscores = dy @ transposed(v)
    draw = dscores / float(np.sqrt(q.shape[-1]))
    dq = draw @ k
    dk = transposed(draw) @ q
    return dq, dk, dv
''',
    },
    {
        "mistake": "rho is not transposed in dv: rho @ dy instead of rhoᵗ @ dy.",
        "gradients": ["dv"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    root = float(np.sqrt(q.shape[-1]))
    drho = np.matmul(dy, np.swapaxes(v, -1, -2))
    draw = softmax_gradient(drho, rho) / root
    dq = np.matmul(draw, k)
    dk = np.matmul(np.swapaxes(draw, -1, -2), q)
    dv = np.matmul(rho, dy)
    return dq, dk, dv
''',
    },
    {
        "mistake": (
            "The arguments of softmax_gradient are exchanged: rho is passed as the gradient, and drho as the weights."
        ),
        "gradients": ["dq", "dk"],
        "code": '''\
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
    """The gradients of q, k and v, from dy (..., Tq, Dv), the gradient of y. To write."""
    q, k, v, rho = saved
    drho = dy @ transposed(v)
    dscores = softmax_gradient(rho, drho)
    draw = dscores / float(np.sqrt(q.shape[-1]))
    dq, dk, dv = draw @ k, transposed(draw) @ q, transposed(rho) @ dy
    return dq, dk, dv
''',
    },
]
