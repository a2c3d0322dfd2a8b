"""The tangents of softmax and cross-entropy: of each token's loss, of the loss, and of the gradient of the logits."""

from __future__ import annotations

from onfoot.arrays import Array, arange, namespace
from onfoot.ops.cross_entropy import IGNORE, CrossEntropySaved


def token_tangents(logits_dot: Array, saved: CrossEntropySaved) -> Array:
    """The tangent of each token's share of the loss, (N,); 0 for a token without a target."""
    predicted, flat_dot, counts, target = _rows(logits_dot, saved)
    picked = flat_dot[arange(flat_dot.shape[0], flat_dot), target]
    return ((predicted * flat_dot).sum(axis=-1) - picked) * counts / saved.divisor  # eq CE.3


def cross_entropy_tangent(logits_dot: Array, saved: CrossEntropySaved) -> tuple[Array, Array]:
    """The tangent of the loss, and ȧ for the backward pass."""
    return token_tangents(logits_dot, saved).sum(), logits_dot


def cross_entropy_backward_tangent(
    dloss: float, dloss_dot: float, saved: CrossEntropySaved, logits_dot: Array
) -> Array:
    """The tangent of the gradient of the logits: that of y_pred, since y_gt is constant."""
    predicted, flat_dot, counts, _ = _rows(logits_dot, saved)
    predicted_dot = predicted * (flat_dot - (predicted * flat_dot).sum(axis=-1, keepdims=True))
    dlogits_dot = predicted_dot * counts[:, None] * (dloss / saved.divisor)  # eq CE.4
    return dlogits_dot.reshape(logits_dot.shape)


def _rows(logits_dot: Array, saved: CrossEntropySaved) -> tuple[Array, Array, Array, Array]:
    """y_pred and ȧ, one row per token, whether a token has a target, and the targets (0 where there is none)."""
    xp = namespace(logits_dot)
    flat = saved.logits.reshape(-1, logits_dot.shape[-1])
    counts = saved.targets != IGNORE
    target = xp.where(counts, saved.targets, xp.zeros_like(saved.targets))
    return xp.exp(flat - saved.lse[:, None]), logits_dot.reshape(flat.shape), counts, target
