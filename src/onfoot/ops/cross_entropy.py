"""Softmax and cross-entropy: the loss of next-token prediction.

A target of −100 is ignored: its token adds nothing to the loss, and its row of the gradient is 0. The divisor is
explicit: 1 gives the paper's sum, the number of targets that are not ignored gives the mean. A step that is split over
microbatches or ranks passes the divisor of the whole step, so that the gradients of its parts add up exactly.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, arange, namespace

IGNORE = -100


class CrossEntropySaved(NamedTuple):
    logits: Array  # (..., V)
    lse: Array  # (N,), log Σ exp(logits)
    targets: Array  # (N,)
    divisor: float


def log_sum_exp(logits: Array) -> Array:
    """log Σ exp over the last axis, without overflow."""
    xp = namespace(logits)
    top = xp.amax(logits, axis=-1, keepdims=True)
    return xp.log(xp.exp(logits - top).sum(axis=-1)) + top[..., 0]


def cross_entropy_forward(logits: Array, targets: Array, divisor: float) -> tuple[Array, CrossEntropySaved]:
    """L = Σ (log Σ exp a − a[target]) / divisor, over the tokens that have a target."""
    xp = namespace(logits)
    flat = logits.reshape(-1, logits.shape[-1])  # (N, V)
    target = targets.reshape(-1)  # (N,)
    counts = target != IGNORE
    lse = log_sum_exp(flat)  # (N,)
    picked = flat[arange(flat.shape[0], flat), xp.where(counts, target, xp.zeros_like(target))]
    loss = ((lse - picked) * counts).sum() / divisor  # eq CE.1  ℓ = −y_gt ⊖ log y_pred
    return loss, CrossEntropySaved(logits, lse, target, divisor)


def cross_entropy_backward(dloss: Array | float, saved: CrossEntropySaved) -> Array:
    """The gradient of the logits: (y_pred − y_gt)/divisor, 0 in rows without a target."""
    logits, lse, target, divisor = saved
    xp = namespace(logits)
    flat = logits.reshape(-1, logits.shape[-1])
    counts = target != IGNORE
    dlogits = xp.exp(flat - lse[:, None])  # y_pred, (N, V)
    rows = arange(flat.shape[0], flat)
    dlogits[rows, xp.where(counts, target, xp.zeros_like(target))] -= 1  # eq CE.2  Δ_12 = y_pred − y_gt
    dlogits = xp.where(counts[:, None], dlogits * (dloss / divisor), 0)
    return dlogits.reshape(logits.shape)
