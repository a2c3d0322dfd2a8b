"""The derivative of one AdamW step, backwards: from the adjoints after the step to those before it.

The adjoint of an array is the derivative of the query's loss with respect to it. A step maps the parameters and the two
moments before it to those after it; its adjoint is the transpose of that map's derivative, one line per line of the
update, in reverse order (docs/equations/blame.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onfoot.ops.update import correction

Arrays = dict[str, np.ndarray]


class UpdateSettings(NamedTuple):
    """The numbers of one AdamW step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    steps: int  # t = 1, 2, ...: the number of this step
    scale: float  # of the clipped gradient, 1 if it was not clipped
    norm: float  # of the gradient before clipping


@dataclass
class Adjoints:
    """The adjoints of the parameters and of both moments, by name, in float64."""

    params: Arrays
    m: Arrays
    v: Arrays

    @classmethod
    def of_query(cls, gradient: Mapping[str, np.ndarray]) -> Adjoints:
        """The adjoints after the last step: the gradient of the query's loss, and 0 for the moments."""
        params = {name: g.astype(np.float64) for name, g in gradient.items()}
        m, v = ({name: np.zeros_like(g) for name, g in params.items()} for _ in range(2))
        return cls(params, m, v)


def update_backward(
    adjoints: Adjoints,
    m: Mapping[str, np.ndarray],
    v: Mapping[str, np.ndarray],
    grads: Mapping[str, np.ndarray],
    decays: Mapping[str, float],
    at: UpdateSettings,
) -> Arrays:
    """The adjoint of the gradient before clipping, given the moments after the step and the gradient.

    `adjoints` becomes those before the step, except that of the parameters, which lacks the term H ḡ: the gradient
    depends on the parameters too.
    """
    clipped = {name: _moments_backward(name, adjoints, m[name], v[name], g, at) for name, g in grads.items()}
    for name in grads:
        adjoints.params[name] *= 1 - at.lr * decays[name]  # eq BL.7
    return clip_backward(clipped, grads, at.scale, at.norm)


def _moments_backward(
    name: str, adjoints: Adjoints, m: np.ndarray, v: np.ndarray, g: np.ndarray, at: UpdateSettings
) -> np.ndarray:
    """The adjoint of the clipped gradient; the moments' adjoints become those before the step."""
    beta1, beta2 = at.betas
    correction1, correction2 = correction(beta1, at.steps), correction(beta2, at.steps)
    root = np.sqrt(v.astype(np.float64) / correction2)  # √v̂
    spread = root + at.eps
    dm, dv = adjoints.m[name], adjoints.v[name]
    du = -at.lr * adjoints.params[name] / spread  # eq BL.1
    dm += du / correction1  # eq BL.2
    slope = np.divide(m / correction1, 2 * root * spread * correction2, out=np.zeros_like(root), where=root > 0)
    dv -= du * slope  # eq BL.3
    dg = (1 - beta1) * dm + (2 * (1 - beta2) * at.scale) * g * dv  # eq BL.4
    dm *= beta1  # eq BL.8
    dv *= beta2
    return dg


def clip_backward(clipped: Arrays, grads: Mapping[str, np.ndarray], scale: float, norm: float) -> Arrays:
    """The adjoint of the gradient from that of the clipped gradient: its part along the gradient is lost."""
    if scale == 1.0:
        return clipped
    along = sum(float(np.vdot(g, clipped[name])) for name, g in grads.items()) / norm**2
    return {name: scale * (clipped[name] - along * g) for name, g in grads.items()}  # eq BL.5
