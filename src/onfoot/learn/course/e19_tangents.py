"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot. To write."""
    x, weight, _ = saved  # as linear_forward saved them
    y_dot = None  # shape (..., out)
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V). To write."""
    rho_dot = None  # shape (..., V)
    return rho_dot


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents. To write."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    y_dot = None  # shape (..., C)
    return y_dot
