"""Muon: the momentum of a matrix's gradient, with its singular values made about equal by Newton–Schulz iterations."""

from __future__ import annotations

import math
from collections.abc import Callable

from onfoot.arrays import Array
from onfoot.ops.linear import weight_gradient
from onfoot.ops.update import sum_of_squares

A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial, by K. Jordan: a steep slope at 0, and values near 1 thereafter
ITERATIONS = 5
SMALLEST = 1e-7  # norm that a matrix is divided by
RMS = 0.2  # of an update's entries relative to the learning rate: about that of AdamW

Product = Callable[[Array, Array], Array]  # aᵗ b


def newton_schulz(x: Array, product: Product = weight_gradient) -> Array:
    """About U Vᵗ of a matrix x = U S Vᵗ: the same singular vectors, with singular values near 1."""
    tall = x if x.shape[0] >= x.shape[1] else x.T  # (n, r), n ≥ r
    tall = tall * (1 / max(math.sqrt(sum_of_squares(x)), SMALLEST))  # eq MUON.3
    for _ in range(ITERATIONS):
        gram = product(tall, tall)  # eq MUON.4  (r, r)
        mixed = B * gram + C * product(gram, gram)  # eq MUON.5  (r, r)
        tall = A * tall + product(tall.T, mixed)  # eq MUON.6
    return tall if x.shape[0] >= x.shape[1] else tall.T


def muon_update(
    p: Array,
    m: Array,
    g: Array,
    lr: float,
    momentum: float,
    decay: float,
    scale: float = 1.0,
    product: Product = weight_gradient,
) -> None:
    """One update of a matrix p and its momentum m in place; `scale` multiplies the gradient."""
    g = g * scale if scale != 1.0 else g
    m *= momentum
    m += (1 - momentum) * g  # eq MUON.1
    ahead = (1 - momentum) * g + momentum * m  # eq MUON.2
    p *= 1 - lr * decay  # eq MUON.7
    p -= lr * RMS * math.sqrt(max(p.shape)) * newton_schulz(ahead, product)  # eq MUON.8
