"""The DPO loss: a model should prefer the chosen answers to the rejected ones more than its reference does.

The inputs are log-probabilities of whole answers, sums over their tokens, one number per pair. The reference is
constant, so the gradients are those of the policy's two. The loss is not a layer of a network: no engine has it.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, namespace


class DpoSaved(NamedTuple):
    margin: Array  # (N,)
    beta: float
    label_smoothing: float
    divisor: float


def softplus(x: Array) -> Array:
    """log(1 + exp x) = −log σ(−x), without overflow, and exact where it is small."""
    xp = namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x)) + xp.log1p(xp.exp(-xp.abs(x)))


def sigmoid(x: Array) -> Array:
    """σ(x) = 1/(1 + exp(−x)), without overflow, and exact where it is small."""
    return namespace(x).exp(-softplus(-x))


def dpo_loss_forward(
    chosen: Array,
    rejected: Array,
    reference_chosen: Array,
    reference_rejected: Array,
    beta: float,
    label_smoothing: float = 0.0,
    divisor: float = 1.0,
) -> tuple[Array, DpoSaved]:
    """L = Σ −log σ(margin) / divisor over the pairs; with label smoothing ε, a share ε of −log σ(−margin) instead."""
    margin = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))  # eq DPO.1
    flipped = label_smoothing
    losses = (1 - flipped) * softplus(-margin) + flipped * softplus(margin)  # eq DPO.2
    return losses.sum() / divisor, DpoSaved(margin, beta, label_smoothing, divisor)


def dpo_loss_backward(dloss: Array | float, saved: DpoSaved) -> tuple[Array, Array]:
    """The gradients of the policy's log-probabilities of the chosen and of the rejected answers, (N,) each."""
    margin, beta, flipped, divisor = saved
    push = (1 - flipped) * sigmoid(-margin) - flipped * sigmoid(margin)  # eq DPO.3
    weight = push * (beta * dloss / divisor)
    return -weight, weight  # eq DPO.4
