"""AdamW: steps scaled by running means of the gradient and of its square, with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import Array, namespace, to_numpy
from onfoot.ops import sum_of_squares
from onfoot.ops.update import Update

if TYPE_CHECKING:
    from onfoot.models.model import Model

TOGETHER = 1 << 20  # numbers that are updated at a time: small parameters wait for others


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
        self._lr = lr  # of the step that was begun
        self._waiting: list[Update] = []
        self._waiting_numbers = 0
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
        return sum(self.model.engine.sum_of_squares(g) for g in grads.values())

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

    def expect(self, names: Iterable[str]) -> None:
        """Refuses parameters that this optimizer has no running means of."""
        unknown = sorted(name for name in names if name not in self.m)
        if unknown:
            raise ValueError(
                f"{unknown[0]} did not train when this optimizer was made, so there are no running means of it; make "
                f"a new AdamW after add_lora(), or after whatever else changed what trains"
            )

    def begin_step(self, lr: float | None = None) -> None:
        """Another step, at the given learning rate or the optimizer's own."""
        self.steps += 1
        self._lr = self.lr if lr is None else lr

    def step(self, grads: Mapping[str, Array], lr: float | None = None, scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient; `scale` multiplies all gradients."""
        self.expect(grads)
        self.begin_step(lr)
        for name, grad in grads.items():
            self.update(name, grad, scale)
        self.end_step(scale)

    def update(self, name: str, g: Array, scale: float = 1.0) -> None:
        """One parameter's part of the step that was begun; done by `end_step` at the latest."""
        p = self.model.params[name]
        self.apply(p, g, self.m[name], self.v[name], decays=p.ndim > 1, scale=scale)

    def apply(self, p: Array, g: Array, m: Array, v: Array, decays: bool, scale: float = 1.0) -> None:
        """The update of some elements and their moments, together with those that come after it if they are few."""
        self._waiting.append((p, m, v, g, self.weight_decay if decays else 0.0))
        self._waiting_numbers += math.prod(p.shape)
        if self._waiting_numbers >= TOGETHER:
            self.end_step(scale)

    def end_step(self, scale: float = 1.0) -> None:
        """Does the updates that wait."""
        self.model.engine.adamw_updates(self._waiting, self._lr, self.betas, self.eps, self.steps, scale)
        self._waiting, self._waiting_numbers = [], 0


def global_norm(grads: Mapping[str, Array]) -> float:
    """The norm of all gradients taken as one vector, summed in float64."""
    return math.sqrt(sum(sum_of_squares(g) for g in grads.values()))


def clip_scale(norm: float, most: float) -> float:
    """What gradients of this norm are multiplied with so that it is at most `most`; 0 means no limit."""
    return most / norm if most and norm > most else 1.0
