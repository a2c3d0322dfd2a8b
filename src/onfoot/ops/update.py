"""Sums and optimizer updates on plain arrays."""

from __future__ import annotations

import math

import numpy as np

from onfoot.arrays import Array, namespace

Update = tuple[Array, Array, Array, Array, float]  # p, m, v, g, decay


def add(x: Array, y: Array) -> Array:
    """x + y, as in a skip connection, or for the gradients of two branches."""
    return x + y


def sum_first(x: Array) -> Array:
    """Σ over the first axis, as for parameters that all sequences of a batch share."""
    return x.sum(axis=0)


def correction(beta: float, steps: int) -> float:
    """1 − βᵗ, without cancellation for β close to 1."""
    return -math.expm1(steps * math.log(beta)) if beta else 1.0


def _check(p: Array, m: Array, v: Array, g: Array, decay: float) -> None:
    """Raises an error if shapes do not match or an array is read-only."""
    if not p.shape == m.shape == v.shape == g.shape:
        raise ValueError(
            f"the gradient has shape {tuple(g.shape)}, the running means {tuple(m.shape)} and {tuple(v.shape)}, "
            f"the parameter {tuple(p.shape)}; they must all match"
        )
    if any(isinstance(x, np.ndarray) and not x.flags.writeable for x in (p, m, v)):
        raise ValueError(
            f"cannot update a parameter of shape {tuple(p.shape)}: its memory, or that of its running means, is "
            f"read-only; replace it with a copy"
        )


def adamw_update(
    p: Array,
    m: Array,
    v: Array,
    g: Array,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    steps: int,
    scale: float = 1.0,
) -> None:
    """One update of p, m and v in place. `decay` is 0 for biases and norms; `scale` multiplies the gradient."""
    beta1, beta2 = betas
    g = g * scale if scale != 1.0 else g
    p *= 1 - lr * decay  # eq ADAM.1
    m *= beta1
    m += (1 - beta1) * g  # eq ADAM.2
    v *= beta2
    v += (1 - beta2) * (g * g)  # eq ADAM.3
    spread = namespace(v).sqrt(v)
    spread *= 1 / math.sqrt(correction(beta2, steps))  # eq ADAM.4
    spread += eps
    p -= (lr / correction(beta1, steps)) * m / spread  # eq ADAM.5


def adamw_updates(
    updates: list[Update], lr: float, betas: tuple[float, float], eps: float, steps: int, scale: float = 1.0
) -> None:
    """One update of several parameters, each with its p, m, v, g and decay: all of them, or none if one is invalid."""
    for one in updates:
        _check(*one)
    for p, m, v, g, decay in updates:
        adamw_update(p, m, v, g, lr, betas, eps, decay, steps, scale)


def sum_of_squares(x: Array) -> float:
    """Σ x², in float64."""
    if isinstance(x, np.ndarray):
        flat = x.reshape(-1)
        return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
    return float((x.double() ** 2).sum())
