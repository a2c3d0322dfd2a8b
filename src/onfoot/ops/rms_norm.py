"""RMS norm: each token's features divided by their root mean square, then scaled; no mean subtracted, no bias."""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, namespace, rows


class RMSNormSaved(NamedTuple):
    normed: Array  # x/r, (..., C)
    inverse: Array  # 1/r, (..., 1)
    weight: Array


def rms_norm_forward(x: Array, weight: Array, eps: float = 1e-6) -> tuple[Array, RMSNormSaved]:
    """y = (x/r) ∘ w with r = √(mean x² + eps), over the features of each token."""
    inverse = 1 / namespace(x).sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # eq RMS.1
    normed = x * inverse
    return normed * weight, RMSNormSaved(normed, inverse, weight)  # eq RMS.2


def rms_norm_backward(dy: Array, saved: RMSNormSaved) -> tuple[Array, Array]:
    """Gradients of x and weight."""
    normed, inverse, weight = saved
    dnormed = dy * weight  # (..., C): inside the mean below, not outside it
    along = (normed * dnormed).mean(axis=-1, keepdims=True)
    dx = (dnormed - normed * along) * inverse  # eq RMS.3
    dweight = rows(normed * dy).sum(axis=0)  # eq RMS.4  (C,)
    return dx, dweight
