"""The derivative of one AdamW step, backwards: from the adjoints after the step to those before it.

The adjoint of an array is the derivative of the query's loss with respect to it. A step maps the parameters and the two
moments before it to those after it; its adjoint is the transpose of that map's derivative, one line per line of the
update, in reverse order (docs/equations/blame.md). All trained parameters form one vector of length P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onfoot.ops.update import correction

CHUNK = 1 << 14  # elements at a time, so that intermediate results stay in the cache


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
    """The adjoints of the parameters and of both moments, (P,) each, in float64."""

    params: np.ndarray
    m: np.ndarray
    v: np.ndarray

    @classmethod
    def of_query(cls, gradient: np.ndarray) -> Adjoints:
        """The adjoints after the last step: the gradient of the query's loss, and 0 for the moments."""
        return cls(gradient.astype(np.float64), np.zeros(gradient.shape), np.zeros(gradient.shape))


def update_backward(
    adjoints: Adjoints, m: np.ndarray, v: np.ndarray, g: np.ndarray, decay: np.ndarray, at: UpdateSettings
) -> np.ndarray:
    """The adjoint of the gradient before clipping, (P,), given the moments after the step and the gradient.

    `decay` is the weight decay of each element. `adjoints` becomes those before the step, except that of the
    parameters, which lacks the term H ḡ: the gradient depends on the parameters too.
    """
    dg = np.empty(g.shape)
    for begin in range(0, len(g), CHUNK):
        part = slice(begin, begin + CHUNK)
        du = adjoints.params[part], adjoints.m[part], adjoints.v[part]
        dg[part] = moments_backward(*du, m[part], v[part], g[part], at)
        adjoints.params[part] *= 1 - at.lr * decay[part]  # eq BL.7
    return clip_backward(dg, g, at.scale, at.norm)


def moments_backward(
    dp: np.ndarray, dm: np.ndarray, dv: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, at: UpdateSettings
) -> np.ndarray:
    """The adjoint of the clipped gradient; those of the moments, dm and dv, become those before the step."""
    beta1, beta2 = at.betas
    correction1, correction2 = correction(beta1, at.steps), correction(beta2, at.steps)
    root = np.sqrt(v / correction2, dtype=np.float64)  # √v̂
    spread = root + at.eps
    u = -at.lr * dp / spread  # eq BL.1
    dm += u / correction1  # eq BL.2
    slope = np.divide(m / correction1, 2 * correction2 * root * spread, out=np.zeros_like(root), where=root > 0)
    dv -= u * slope  # eq BL.3
    dg = (1 - beta1) * dm + (2 * (1 - beta2) * at.scale) * g * dv  # eq BL.4
    dm *= beta1  # eq BL.8
    dv *= beta2
    return dg


def clip_backward(dg: np.ndarray, g: np.ndarray, scale: float, norm: float) -> np.ndarray:
    """The adjoint of the gradient from that of the clipped gradient: its part along the gradient is lost."""
    return dg if scale == 1.0 else scale * (dg - g * (np.vdot(g, dg) / norm**2))  # eq BL.5
