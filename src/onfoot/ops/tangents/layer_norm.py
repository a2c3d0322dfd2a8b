"""The tangents of layer norm. The same projection occurs forward and backward: what is left after mean and ā."""

from __future__ import annotations

from onfoot.arrays import Array, rows
from onfoot.ops.layer_norm import LayerNormSaved


def layer_norm_tangent(
    x_dot: Array, weight_dot: Array | None, bias_dot: Array | None, saved: LayerNormSaved
) -> tuple[Array, LayerNormSaved]:
    """ẏ = ā̇ ∘ w + ā ∘ ẇ + ḃ."""
    normed, rstd, weight = saved
    along = (normed * x_dot).mean(axis=-1, keepdims=True)  # (..., 1)
    rstd_dot = -rstd * rstd * along  # eq LN.1
    normed_dot = (x_dot - x_dot.mean(axis=-1, keepdims=True) - normed * along) * rstd  # eq LN.2
    y_dot = normed_dot * weight  # eq LN.3
    if weight_dot is not None:
        y_dot = y_dot + normed * weight_dot
    if bias_dot is not None:
        y_dot = y_dot + bias_dot
    return y_dot, LayerNormSaved(normed_dot, rstd_dot, weight_dot)


def layer_norm_backward_tangent(
    dy: Array, dy_dot: Array, saved: LayerNormSaved, saved_dot: LayerNormSaved
) -> tuple[Array, Array, Array]:
    """Tangents of the gradients of x, weight and bias."""
    normed, rstd, weight = saved
    normed_dot, rstd_dot, weight_dot = saved_dot
    g, g_dot = dy * weight, dy_dot * weight  # the gradient of ā, and its tangent
    if weight_dot is not None:
        g_dot = g_dot + dy * weight_dot  # eq LN.4
    mean, mean_dot = (x.mean(axis=-1, keepdims=True) for x in (g, g_dot))
    along = (normed * g).mean(axis=-1, keepdims=True)
    along_dot = (normed_dot * g + normed * g_dot).mean(axis=-1, keepdims=True)
    inner = g - mean - normed * along  # dx σ
    inner_dot = g_dot - mean_dot - normed_dot * along - normed * along_dot
    dx_dot = inner_dot * rstd + inner * rstd_dot  # eq LN.5
    dweight_dot = rows(normed_dot * dy + normed * dy_dot).sum(axis=0)  # eq LN.6  (C,)
    dbias_dot = rows(dy_dot).sum(axis=0)  # eq LN.7  (C,)
    return dx_dot, dweight_dot, dbias_dot
