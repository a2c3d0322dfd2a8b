"""The skeleton that the formulas of this package share: attention's backward pass with one piece exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onfoot.ops.attention import attention_weights

Array = np.ndarray
SoftmaxBackward = Callable[[Array, Array], Array]  # dρ, ρ -> the gradient of the scores


def t(x: Array) -> Array:
    """xᵗ, of the last two axes."""
    return np.swapaxes(x, -1, -2)


def scaled_scores(q: Array, k: Array) -> Array:
    """q kᵗ/√d_ρ."""
    return q @ t(k) / math.sqrt(q.shape[-1])


def core_with(softmax_backward: SoftmaxBackward) -> Callable[..., tuple[Array, Array, Array]]:
    """(q, k, v, dout) -> (dq, dk, dv), right in all but the given gradient of softmax."""

    def backward(q: Array, k: Array, v: Array, dout: Array, causal: bool = True) -> tuple[Array, Array, Array]:
        rho = attention_weights(q, k, causal)
        draw = softmax_backward(dout @ t(v), rho) / math.sqrt(q.shape[-1])
        return draw @ k, t(draw) @ q, t(rho) @ dout

    return backward
