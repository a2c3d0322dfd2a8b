"""Six typical wrong answers to e19_tangents: each is a right answer but for one mistake."""

WRONG = [
    {
        "mistake": "The product rule is half done: only x moves in the product, the term with weight_dot is forgotten.",
        "gradients": ["y_dot"],
        "function": "linear_tangent",
        "code": '''\
"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    y_dot = x_dot @ weight + bias_dot
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    rho_dot = rho * (scores_dot - (rho * scores_dot).sum(axis=-1, keepdims=True))
    return rho_dot


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    along = (normed * x_dot).mean(axis=-1, keepdims=True)
    normed_dot = rstd * (x_dot - x_dot.mean(axis=-1, keepdims=True) - normed * along)
    y_dot = normed_dot * weight + normed * weight_dot + bias_dot
    return y_dot
''',
    },
    {
        "mistake": "The bias moves too, but bias_dot is left out of the tangent of the linear layer.",
        "gradients": ["y_dot"],
        "function": "linear_tangent",
        "code": '''\
"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    flat = rows(x_dot) @ weight + rows(x) @ weight_dot
    y_dot = flat.reshape(*x.shape[:-1], weight.shape[1])
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    weighted = rho * scores_dot
    rho_dot = weighted - rho * np.sum(weighted, axis=-1, keepdims=True)
    return rho_dot


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    centred_dot = x_dot - np.mean(x_dot, axis=-1, keepdims=True)
    normed_dot = rstd * (centred_dot - normed * np.mean(normed * centred_dot, axis=-1, keepdims=True))
    y_dot = weight * normed_dot + weight_dot * normed + bias_dot
    return y_dot
''',
    },
    {
        "mistake": (
            "Only the diagonal of softmax's derivative is used: that a score moves the other weights as well is "
            "forgotten."
        ),
        "gradients": ["rho_dot"],
        "function": "softmax_tangent",
        "code": '''\
"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    y_dot = np.einsum("...i,io->...o", x_dot, weight) + np.einsum("...i,io->...o", x, weight_dot) + bias_dot
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    rho_dot = rho * (1 - rho) * scores_dot
    return rho_dot


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    n = normed.shape[-1]
    mean_dot = x_dot.sum(-1, keepdims=True) / n
    dot = np.einsum("...c,...c->...", normed, x_dot)[..., None] / n
    y_dot = rstd * (x_dot - mean_dot - normed * dot) * weight + normed * weight_dot + bias_dot
    return y_dot
''',
    },
    {
        "mistake": "The plain mean of scores_dot is subtracted instead of its mean with the weights rho.",
        "gradients": ["rho_dot"],
        "function": "softmax_tangent",
        "code": '''\
"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    moved_x = np.matmul(x_dot, weight)
    moved_weight = np.matmul(x, weight_dot)
    y_dot = moved_x + moved_weight + bias_dot
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    centre = scores_dot.mean(-1, keepdims=True)
    rho_dot = rho * (scores_dot - centre)
    return rho_dot


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    def mean(a):
        return a.mean(-1, keepdims=True)

    normed_dot = (x_dot - mean(x_dot) - normed * mean(normed * x_dot)) * rstd
    return normed_dot * weight + normed * weight_dot + bias_dot
''',
    },
    {
        "mistake": "x_dot is multiplied by weight before the norm, as in the backward pass, instead of after it.",
        "gradients": ["y_dot"],
        "function": "layer_norm_tangent",
        "code": '''\
"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    y_dot = bias_dot + x @ weight_dot + x_dot @ weight
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    mean_dot = (scores_dot * rho).sum(axis=-1, keepdims=True)
    return (scores_dot - mean_dot) * rho


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    t = x_dot * weight
    normed_dot = rstd * (t - t.mean(-1, keepdims=True) - normed * (normed * t).mean(-1, keepdims=True))
    y_dot = normed_dot + normed * weight_dot + bias_dot
    return y_dot
''',
    },
    {
        "mistake": "rstd is treated as a constant: that the variance moves with x is forgotten.",
        "gradients": ["y_dot"],
        "function": "layer_norm_tangent",
        "code": '''\
"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    y_dot = x_dot @ weight
    y_dot = y_dot + x @ weight_dot
    y_dot = y_dot + bias_dot
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    rho_dot = rho * scores_dot
    rho_dot = rho_dot - rho * rho_dot.sum(axis=-1, keepdims=True)
    return rho_dot


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    centred_dot = x_dot - x_dot.mean(axis=-1, keepdims=True)
    normed_dot = centred_dot * rstd
    y_dot = normed_dot * weight + normed * weight_dot
    y_dot = y_dot + bias_dot
    return y_dot
''',
    },
]
