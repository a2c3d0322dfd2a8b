"""AdamW: steps scaled by running means of the gradient and of its square, with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import Array, namespace, to_numpy

if TYPE_CHECKING:
    from onfoot.models.model import Model


class AdamW:
    """Updates a model's trainable parameters in place. Biases and norms are not decayed."""

    def __init__(
        self,
        model: Model,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr={lr}: 0 or above is needed")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: each must be in [0, 1)")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay}: 0 or above is needed")
        self.model = model
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps = 0
        self.m: dict[str, Array] = {}
        self.v: dict[str, Array] = {}
        self.make_moments()

    def make_moments(self) -> None:
        """The running means before the first step: 0."""
        for name in sorted(self.model.trainable):
            xp = namespace(self.model.params[name])
            self.m[name] = xp.zeros_like(self.model.params[name])
            self.v[name] = xp.zeros_like(self.model.params[name])

    def moments(self) -> dict[str, np.ndarray]:
        """The running means by the names that they have in a checkpoint."""
        means = {f"m.{k}": to_numpy(x) for k, x in self.m.items()}
        return means | {f"v.{k}": to_numpy(x) for k, x in self.v.items()}

    def send_moments(self) -> None:
        """What a rank that does not write has to do when another does: nothing, where each has all."""

    def everything(self) -> list[np.ndarray]:
        """What must be the same on all ranks: the trained weights and the running means."""
        weights = [to_numpy(self.model.params[name]) for name in sorted(self.model.trainable)]
        return weights + list(self.moments().values())

    def squares(self, grads: Mapping[str, Array]) -> float:
        """The sum of the squares of these gradients, in float64."""
        return sum(_squares(g) for g in grads.values())

    def total(self, squares: np.ndarray) -> float:
        """The sum of the squares of all gradients, from what each rank has: all of them, or nearly so in rounding."""
        return float(squares.max())

    def restore(self, moments: Mapping[str, np.ndarray], steps: int) -> None:
        """Goes on from saved running means after that many steps."""
        floats = self.model.engine.floats
        for name in self.m:
            self.m[name] = floats(moments[f"m.{name}"].copy(), self.model.dtype)
            self.v[name] = floats(moments[f"v.{name}"].copy(), self.model.dtype)
        self.steps = steps

    def step(self, grads: Mapping[str, Array], lr: float | None = None) -> None:
        """One update of every parameter that has a gradient, at the given learning rate or the optimizer's own."""
        unknown = [name for name in grads if name not in self.m]
        if unknown:
            raise ValueError(
                f"{unknown[0]} did not train when this optimizer was made, so there are no running means of it; make "
                f"a new AdamW after add_lora(), or after whatever else changed what trains"
            )
        self.steps += 1
        for name, grad in grads.items():
            self.update(name, grad, self.lr if lr is None else lr)

    def update(self, name: str, g: Array, lr: float) -> None:
        """One parameter's update."""
        p = self.model.params[name]
        self.apply(p, g, self.m[name], self.v[name], lr, decays=p.ndim > 1)

    def apply(self, p: Array, g: Array, m: Array, v: Array, lr: float, decays: bool) -> None:
        """The update of some elements and their moments. The second moment is weighted with 1 − β₂, not 1 − β₁."""
        beta1, beta2 = self.betas
        if decays:
            p *= 1 - lr * self.weight_decay  # eq ADAM.1: decay acts on the weight, not through the gradient
        m *= beta1
        m += (1 - beta1) * g  # eq ADAM.2
        v *= beta2
        v += (1 - beta2) * (g * g)  # eq ADAM.3
        spread = namespace(v).sqrt(v)
        spread *= 1 / math.sqrt(1 - beta2**self.steps)  # eq ADAM.4: both means start at 0 and are corrected for it
        spread += self.eps
        p -= (lr / (1 - beta1**self.steps)) * m / spread  # eq ADAM.5


def global_norm(grads: Mapping[str, Array]) -> float:
    """The norm of all gradients taken as one vector, summed in float64."""
    return math.sqrt(sum(_squares(g) for g in grads.values()))


def clip(grads: Mapping[str, Array], max_norm: float, norm: float | None = None) -> float:
    """Scales all gradients in place so that their global norm is at most `max_norm`; returns the norm before.

    `norm`: that norm, where it is known, or where there are more gradients than these.
    """
    norm = global_norm(grads) if norm is None else norm
    if norm > max_norm:
        for g in grads.values():
            g *= max_norm / norm
    return norm


def _squares(g: Array) -> float:
    flat = g.reshape(-1)
    if isinstance(flat, np.ndarray):
        return float(np.einsum("i,i->", flat, flat, dtype=np.float64))
    return float((flat.double() ** 2).sum())
