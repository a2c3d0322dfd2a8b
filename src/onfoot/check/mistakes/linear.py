"""Known mistakes in a linear layer."""

from __future__ import annotations

import numpy as np

from onfoot.arrays import rows
from onfoot.check.layer import Array, Mistake


def input_gradient_after_update(dy: Array, x: Array, weight: Array, learning_rate: float) -> Array:
    """Δ w'ᵗ with w' = w − η ∂w: the weight is updated before dx is computed."""
    return dy @ (weight - learning_rate * rows(x).T @ rows(dy)).T


MISTAKES = (
    Mistake(
        "dx without the transpose of the weight",
        "linear",
        "dx = dout weight: it runs only if in and out features are equal.",
        "FC.2",
        "dx = dout weightᵗ",
        lambda p: {"through": lambda dy, weight, x: dy @ weight},
    ),
    Mistake(
        "the weight left out of dx",
        "linear",
        "dx = dout: the gradient of the output is returned as that of the input.",
        "FC.2",
        "dx = dout weightᵗ",
        lambda p: {"through": lambda dy, weight, x: 1.0 * dy},
        "E17",
    ),
    Mistake(
        "update before propagation",
        "linear",
        "The weight is updated first, and dx is computed with the new one.",
        "FC.2",
        "compute dx before the update; call the optimizer after all gradients are computed",
        lambda p, value: {
            "through": lambda dy, weight, x: input_gradient_after_update(dy, x, weight, value),
        },
        "E32, E40",
        parameter="learning rate",
    ),
    Mistake(
        "dweight transposed",
        "linear",
        "dweight = doutᵗ x has shape (out, in).",
        "FC.3",
        "dweight = xᵗ dout, (in, out)",
        lambda p: {"dweight": lambda x, dy: rows(dy).T @ rows(x)},
    ),
    Mistake(
        "dweight of a single sequence",
        "linear",
        "xᵗ dout of only the last sequence; all sequences of a batch share the weight.",
        "FC.3",
        "sum over the batch: reshape x and dout to (batch · tokens, features) first",
        lambda p: {"dweight": lambda x, dy: x[-1].T @ dy[-1]},
    ),
    Mistake(
        "dweight not summed over the batch",
        "linear",
        "One xᵗ dout per sequence: dweight has an extra axis.",
        "FC.3",
        "sum over the batch: reshape x and dout to (batch · tokens, features) first",
        lambda p: {"dweight": lambda x, dy: np.swapaxes(x, -1, -2) @ dy},
    ),
    Mistake(
        "dbias summed over features",
        "linear",
        "dout is summed over the last axis: one number per token instead of one per feature.",
        "FC.4",
        "dbias = Σ_tokens dout, over batch and tokens",
        lambda p: {"dbias": lambda dy: rows(dy).sum(axis=1)},
    ),
    Mistake(
        "dbias not summed over all tokens",
        "linear",
        "dout is summed over the batch only: dbias has an extra axis.",
        "FC.4",
        "dbias = Σ_tokens dout, over batch and tokens",
        lambda p: {"dbias": lambda dy: dy.sum(axis=0)},
    ),
    Mistake(
        "dbias of a single sequence",
        "linear",
        "dout is summed over the tokens of the last sequence only.",
        "FC.4",
        "dbias = Σ_tokens dout, over batch and tokens",
        lambda p: {"dbias": lambda dy: dy[-1].sum(axis=0)},
    ),
)
