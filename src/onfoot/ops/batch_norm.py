"""Batch norm: each feature to mean 0 and variance 1 over the batch, then scaled and shifted.

All leading axes together are the batch. The statistics are those of the batch, in training; there are no running ones.
No transformer here uses it: it is what layer norm is derived from, with rows and columns exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, namespace, rows


class BatchNormSaved(NamedTuple):
    normed: Array  # ā, (..., C)
    rstd: Array  # 1/σ, (C,)
    weight: Array


def batch_norm_forward(x: Array, weight: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, BatchNormSaved]:
    """y = ā ∘ w + b with ā = (x − μ)/σ, over the batch for each feature."""
    xp = namespace(x)
    centred = x - over_batch(x)
    variance = over_batch(centred * centred)  # (C,), the biased variance: divided by N, not N − 1
    rstd = 1 / xp.sqrt(variance + eps)  # (C,)
    normed = centred * rstd  # eq BN.1
    return normed * weight + bias, BatchNormSaved(normed, rstd, weight)  # eq BN.2


def batch_norm_backward(dy: Array, saved: BatchNormSaved) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and bias."""
    normed, rstd, weight = saved
    dnormed = dy * weight  # (..., C)
    along = over_batch(normed * dnormed)  # (C,)
    dx = (dnormed - over_batch(dnormed) - normed * along) * rstd  # eq BN.3
    dweight = rows(normed * dy).sum(axis=0)  # eq BN.4  (C,)
    dbias = rows(dy).sum(axis=0)  # eq BN.5  (C,)
    return dx, dweight, dbias


def over_batch(x: Array) -> Array:
    """The mean of each feature, (C,)."""
    return rows(x).mean(axis=0)
