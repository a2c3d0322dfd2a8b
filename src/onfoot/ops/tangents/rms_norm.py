"""The tangents of RMS norm: those of layer norm without the mean."""

from __future__ import annotations

from onfoot.arrays import Array, rows
from onfoot.ops.rms_norm import RMSNormSaved


def rms_norm_tangent(x_dot: Array, weight_dot: Array | None, saved: RMSNormSaved) -> tuple[Array, RMSNormSaved]:
    """ẏ = n̄̇ ∘ w + n̄ ∘ ẇ with n̄ = x/r."""
    normed, inverse, weight = saved
    along = (normed * x_dot).mean(axis=-1, keepdims=True)  # (..., 1)
    inverse_dot = -inverse * inverse * along  # eq RMS.5
    normed_dot = (x_dot - normed * along) * inverse  # eq RMS.6
    y_dot = normed_dot * weight  # eq RMS.7
    if weight_dot is not None:
        y_dot = y_dot + normed * weight_dot
    return y_dot, RMSNormSaved(normed_dot, inverse_dot, weight_dot)


def rms_norm_backward_tangent(
    dy: Array, dy_dot: Array, saved: RMSNormSaved, saved_dot: RMSNormSaved
) -> tuple[Array, Array]:
    """Tangents of the gradients of x and weight."""
    normed, inverse, weight = saved
    normed_dot, inverse_dot, weight_dot = saved_dot
    g, g_dot = dy * weight, dy_dot * weight  # the gradient of x/r, and its tangent
    if weight_dot is not None:
        g_dot = g_dot + dy * weight_dot  # eq RMS.8
    along = (normed * g).mean(axis=-1, keepdims=True)
    along_dot = (normed_dot * g + normed * g_dot).mean(axis=-1, keepdims=True)
    inner = g - normed * along  # dx r
    inner_dot = g_dot - normed_dot * along - normed * along_dot
    dx_dot = inner_dot * inverse + inner * inverse_dot  # eq RMS.9
    dweight_dot = rows(normed_dot * dy + normed * dy_dot).sum(axis=0)  # eq RMS.10  (C,)
    return dx_dot, dweight_dot
