"""The tangents of batch norm: those of layer norm with means over the batch instead of the features."""

from __future__ import annotations

from onfoot.arrays import Array, rows
from onfoot.ops.batch_norm import BatchNormSaved, over_batch


def batch_norm_tangent(
    x_dot: Array, weight_dot: Array | None, bias_dot: Array | None, saved: BatchNormSaved
) -> tuple[Array, BatchNormSaved]:
    """ẏ = ā̇ ∘ w + ā ∘ ẇ + ḃ."""
    normed, rstd, weight = saved
    along = over_batch(normed * x_dot)  # (C,)
    rstd_dot = -rstd * rstd * along  # eq BN.6
    normed_dot = (x_dot - over_batch(x_dot) - normed * along) * rstd  # eq BN.7
    y_dot = normed_dot * weight  # eq BN.8
    if weight_dot is not None:
        y_dot = y_dot + normed * weight_dot
    if bias_dot is not None:
        y_dot = y_dot + bias_dot
    return y_dot, BatchNormSaved(normed_dot, rstd_dot, weight_dot)


def batch_norm_backward_tangent(
    dy: Array, dy_dot: Array, saved: BatchNormSaved, saved_dot: BatchNormSaved
) -> tuple[Array, Array, Array]:
    """Tangents of the gradients of x, weight and bias."""
    normed, rstd, weight = saved
    normed_dot, rstd_dot, weight_dot = saved_dot
    g, g_dot = dy * weight, dy_dot * weight  # the gradient of ā, and its tangent
    if weight_dot is not None:
        g_dot = g_dot + dy * weight_dot
    along = over_batch(normed * g)
    along_dot = over_batch(normed_dot * g + normed * g_dot)
    inner = g - over_batch(g) - normed * along  # dx σ
    inner_dot = g_dot - over_batch(g_dot) - normed_dot * along - normed * along_dot
    dx_dot = inner_dot * rstd + inner * rstd_dot  # eq BN.9
    dweight_dot = rows(normed_dot * dy + normed * dy_dot).sum(axis=0)  # eq BN.10  (C,)
    dbias_dot = rows(dy_dot).sum(axis=0)  # eq BN.10  (C,)
    return dx_dot, dweight_dot, dbias_dot
