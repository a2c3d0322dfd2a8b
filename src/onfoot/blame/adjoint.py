"""The derivative of one AdamW step, backwards: from the adjoints after the step to those before it.

The adjoint of an array is the derivative of the query's loss with respect to it. A step maps the parameters and the two
moments before it to those after it; its adjoint is the transpose of that map's derivative, one line per line of the
update, in reverse order (docs/equations/blame.md). All trained parameters form one vector of length P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    """The adjoints of the parameters and of both moments, (P,) each."""

    params: np.ndarray
    m: np.ndarray
    v: np.ndarray

    @classmethod
    def of_query(cls, gradient: np.ndarray) -> Adjoints:
        """The adjoints after the last step: the gradient of the query's loss, and 0 for the moments."""
        return cls(gradient.copy(), np.zeros_like(gradient), np.zeros_like(gradient))


def update_backward(
    adjoints: Adjoints, m: np.ndarray, v: np.ndarray, g: np.ndarray, decay: np.ndarray, at: UpdateSettings
) -> np.ndarray:
    """The adjoint of the gradient before clipping, (P,), given the moments after the step and the gradient.

    `decay` is the weight decay of each element. `adjoints` becomes those before the step, except that of the
    parameters, which lacks the term H ḡ: the gradient depends on the parameters too.
    """
    dg, dot = np.empty_like(g), 0.0  # dot: g · ḡ_c
    for part in chunks(g):
        du = adjoints.params[part], adjoints.m[part], adjoints.v[part]
        dg[part] = moments_backward(*du, m[part], v[part], g[part], at)
        adjoints.params[part] *= 1 - at.lr * decay[part]  # eq BL.7
        dot += float(np.dot(g[part], dg[part]))
    if at.scale != 1.0:
        for part in chunks(g):
            dg[part] = at.scale * (dg[part] - (dot / at.norm**2) * g[part])  # eq BL.5
    return dg


def chunks(x: np.ndarray) -> Iterator[slice]:
    """The parts of a vector, of CHUNK elements each."""
    return (slice(begin, begin + CHUNK) for begin in range(0, len(x), CHUNK))


def moments_backward(
    dp: np.ndarray, dm: np.ndarray, dv: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, at: UpdateSettings
) -> np.ndarray:
    """The adjoint of the clipped gradient; those of the moments, dm and dv, become those before the step."""
    beta1, beta2 = at.betas
    correction1, correction2 = correction(beta1, at.steps), correction(beta2, at.steps)
    root = np.sqrt(v) * (1 / math.sqrt(correction2))  # √v̂
    spread = root + at.eps
    u = dp / spread * -at.lr  # eq BL.1
    dm += u * (1 / correction1)  # eq BL.2
    slope = np.divide(m, root * spread, out=np.zeros_like(root), where=root > 0)
    dv -= u * slope * (1 / (2 * correction1 * correction2))  # eq BL.3
    dg = (1 - beta1) * dm + (2 * (1 - beta2) * at.scale) * g * dv  # eq BL.4
    dm *= beta1  # eq BL.8
    dv *= beta2
    return dg
