"""Layer norm: each token's features to mean 0 and variance 1, then scaled and shifted."""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, namespace, rows


class LayerNormSaved(NamedTuple):
    normed: Array  # ā, (..., C)
    rstd: Array  # 1/σ, (..., 1)
    weight: Array


def layer_norm_forward(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, LayerNormSaved]:
    """y = ā ∘ w + b with ā = (x − μ)/σ, over the features of each token."""
    xp = namespace(x)
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)  # the biased variance: divided by C, not C − 1
    rstd = 1 / xp.sqrt(variance + eps)  # (..., 1); eps inside the root, so that the backward pass is exact
    normed = centred * rstd  # eq 36
    y = normed * weight + bias  # eq 37, 38
    return y, LayerNormSaved(normed, rstd, weight)


def layer_norm_backward(dy: Array, saved: LayerNormSaved) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and bias."""
    normed, rstd, weight = saved
    dnormed = dy * weight  # (..., C): inside the means below, not outside them
    mean = dnormed.mean(axis=-1, keepdims=True)
    along = (normed * dnormed).mean(axis=-1, keepdims=True)
    dx = (dnormed - mean - normed * along) * rstd  # eq 40
    dweight = rows(normed * dy).sum(axis=0)  # eq 41  (C,)
    dbias = rows(dy).sum(axis=0)  # eq 42  (C,)
    return dx, dweight, dbias
