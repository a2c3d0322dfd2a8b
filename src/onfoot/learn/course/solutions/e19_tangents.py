"""Exercise 19: tangents, the derivative forwards. The page is e19_tangents.md; check with: onfoot learn check 19"""

import numpy as np
from e01_linear import rows


def linear_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = x weight + bias moves, if x, weight and bias move by x_dot, weight_dot and bias_dot."""
    x, weight, _ = saved  # as linear_forward saved them
    y_dot = (rows(x_dot) @ weight).reshape(*x.shape[:-1], weight.shape[-1])  # (..., out)
    y_dot += (rows(x) @ weight_dot).reshape(y_dot.shape)
    y_dot += bias_dot
    return y_dot


def softmax_tangent(scores_dot, rho):
    """How rho = softmax(scores) moves, if the scores move by scores_dot; all (..., V)."""
    return (scores_dot - (scores_dot * rho).sum(axis=-1, keepdims=True)) * rho


def layer_norm_tangent(x_dot, weight_dot, bias_dot, saved):
    """How y = layer_norm(x, weight, bias) moves, if x, weight and bias move by their tangents."""
    normed, rstd, weight = saved  # as layer_norm_forward saved them: (..., C), (..., 1), (C,)
    along = (normed * x_dot).mean(axis=-1, keepdims=True)  # (..., 1)
    normed_dot = (x_dot - x_dot.mean(axis=-1, keepdims=True) - normed * along) * rstd
    return normed_dot * weight + normed * weight_dot + bias_dot
