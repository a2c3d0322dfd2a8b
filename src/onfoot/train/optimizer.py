"""AdamW: steps scaled by running means of the gradient and of its square, with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import Array, Shape, namespace, to_numpy
from onfoot.models import inputs
from onfoot.ops import sum_of_squares
from onfoot.ops.update import Update
from onfoot.train.interrupts import held_back

if TYPE_CHECKING:
    from onfoot.models.model import Model

MEANS = ("m", "v")  # of the gradient and of its square
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
        self._lr, self._scale = lr, 1.0  # of the step that was begun
        self._torn = False  # some weights have had their part of a step, others not
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

    def everything(self) -> dict[str, np.ndarray]:
        """What must be the same on all ranks: the trained weights and the running means."""
        return {name: to_numpy(self.model.params[name]) for name in sorted(self.model.trainable)} | self.moments()

    def squares(self, grads: Mapping[str, Array]) -> float:
        """The sum of the squares of these gradients, in float64."""
        return sum(self.model.engine.sum_of_squares(g) for g in grads.values())

    def total(self, squares: np.ndarray) -> float:
        """The sum of the squares of all gradients, from what each rank has: all of them, or nearly so in rounding."""
        return float(squares.max())

    def restore(self, moments: Mapping[str, np.ndarray], steps: int) -> None:
        """Goes on from saved running means after that many steps, with weights that the caller has put back."""
        check_moments(moments, {name: tuple(mean.shape) for name, mean in self.m.items()})
        floats = self.model.engine.floats
        for name in self.m:
            self.m[name] = floats(moments[f"m.{name}"].copy(), self.model.dtype)
            self.v[name] = floats(moments[f"v.{name}"].copy(), self.model.dtype)
        self.steps, self._torn = steps, False

    def expect(self, names: Iterable[str]) -> None:
        """Refuses parameters that this optimizer cannot update: without running means of it, or of another shape."""
        unknown = set(names).difference(self.m)
        if unknown:
            raise ValueError(
                f"{min(unknown)} did not train when this optimizer was made, so there are no running means of it; make "
                f"a new AdamW after add_lora(), or after whatever else changed what trains"
            )
        params = self.model.params
        for name in names:  # (quick where all is well: this is done at each step)
            p, mean = params[name], self.m[name]
            if p.shape != mean.shape or p.dtype != mean.dtype:
                raise ValueError(
                    f"{name} is {p.dtype} {tuple(p.shape)}, and was {mean.dtype} {tuple(mean.shape)} when this "
                    f"optimizer was made; make a new AdamW"
                )
            if isinstance(p, np.ndarray) and not p.flags.writeable:
                raise ValueError(f"{name} is read-only and cannot be trained; put a copy of it into params")

    def check(self, grads: Mapping[str, Array]) -> None:
        """Refuses gradients that do not belong to the parameters, before any of these has changed."""
        self.expect(grads)
        params = self.model.params
        for name, grad in grads.items():
            p = params[name]
            if isinstance(grad, np.ndarray) != isinstance(p, np.ndarray) or not hasattr(grad, "shape"):
                raise ValueError(f"the gradient of {name} is a {type(grad).__name__}, and not an array like it")
            if grad.shape != p.shape:
                raise ValueError(f"the gradient of {name} has shape {tuple(grad.shape)}, and {name} {tuple(p.shape)}")
            if grad.dtype != p.dtype:
                raise ValueError(f"the gradient of {name} is {grad.dtype}, and {name} {p.dtype}; convert it")

    @contextmanager
    def one_step(self, lr: float | None = None, scale: float = 1.0) -> Iterator[None]:
        """The updates of one step. If the first of them was done, Ctrl-C waits for the last.

        What breaks off before the first update is no step. What breaks off later, where that cannot be helped, leaves
        weights of which some have changed: the next step is refused then.
        """
        if self._torn:
            raise ValueError(
                "a step broke off halfway: some weights have changed and others have not; load the weights of before "
                "again, and make a new AdamW or restore() this one"
            )
        self._lr, self._scale = self.lr if lr is None else lr, scale
        with held_back(lambda: self._torn):
            try:
                yield
                self.update_waiting()
            finally:
                self._waiting, self._waiting_numbers = [], 0
            self.steps += 1
            self._torn = False

    def step(self, grads: Mapping[str, Array], lr: float | None = None, scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient; `scale` multiplies all gradients."""
        self.check(grads)
        with self.one_step(lr, scale):
            for name, grad in grads.items():
                self.update(name, grad)

    def train_batch(
        self, model: Model, tokens: Any, targets: Any, segments: Any, dropout_seed: int | None, clip: float
    ) -> float:
        """`Model.train_step`: the gradients of one batch, clipped and applied; returns the loss before the step."""
        from onfoot.train.step import Part, one_batch, several

        if not clip >= 0:
            raise ValueError(f"clip={clip}: a norm of at least 0 is needed; 0 clips nothing")
        self.expect(model.trainable)
        part = Part(tokens, targets, segments, dropout_seed)
        if clip:
            return several(model, self, [part], None, None, clip, inputs.no_step)[0]
        return one_batch(model, self, part, None, None, inputs.no_step, norm=False)[0]

    def update(self, name: str, g: Array) -> None:
        """One parameter's part of the step that was begun; done at its end at the latest."""
        p = self.model.params[name]
        self.apply(p, g, self.m[name], self.v[name], decays=p.ndim > 1)

    def apply(self, p: Array, g: Array, m: Array, v: Array, decays: bool) -> None:
        """The update of some elements and their moments, together with those that come after it if they are few."""
        self._waiting.append((p, m, v, g, self.weight_decay if decays else 0.0))
        self._waiting_numbers += math.prod(p.shape)
        if self._waiting_numbers >= TOGETHER:
            self.update_waiting()

    def update_waiting(self) -> None:
        """Does the updates that wait."""
        if not self._waiting:
            return
        self._torn = True
        updates = self.model.engine.adamw_updates
        updates(self._waiting, self._lr, self.betas, self.eps, self.steps + 1, self._scale)
        self._waiting, self._waiting_numbers = [], 0


def check_moments(moments: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> None:
    """Refuses saved running means that are not those of parameters of these names and shapes."""
    expected = {f"{kind}.{name}": tuple(shape) for name, shape in shapes.items() for kind in MEANS}
    for key, shape in expected.items():
        if key not in moments:
            raise ValueError(f"the running mean {key} is missing")
        saved = moments[key]
        if tuple(saved.shape) != shape:
            raise ValueError(f"the running mean {key} has shape {tuple(saved.shape)}, and what trains {shape}")
        if saved.dtype.kind != "f":
            raise ValueError(f"the running mean {key} holds {saved.dtype}, not floating-point numbers")
    unknown = sorted(set(moments) - set(expected))
    if unknown:
        raise ValueError(f"there is a running mean {unknown[0]} of something that does not train")


def global_norm(grads: Mapping[str, Array]) -> float:
    """The norm of all gradients taken as one vector, summed in float64."""
    return math.sqrt(sum(sum_of_squares(g) for g in grads.values()))


def clip_scale(norm: float, most: float) -> float:
    """What gradients of this norm are multiplied with so that it is at most `most`; 0 means no limit."""
    return most / norm if most and norm > most else 1.0
