"""AdamW: updates scaled by running means of the gradient and its square, with decoupled weight decay."""

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
from onfoot.train.interrupts import delay_interrupt

if TYPE_CHECKING:
    from onfoot.models.model import Model

MOMENT_NAMES = ("m", "v")  # running means of the gradient and of its square
UPDATE_ELEMENTS = 1 << 20  # elements per call of the update: small parameters are batched


class AdamW:
    """Updates a model's trainable parameters in place. Biases and norms are not decayed.

    `lr_scales` multiplies the learning rate of the parameters that it names.
    """

    def __init__(
        self,
        model: Model,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        lr_scales: Mapping[str, float] | None = None,
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be >= 0, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
        self.model = model
        self.lr_scales = dict(lr_scales or {})
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps = 0
        self._lr, self._scale = lr, 1.0  # of the current step
        self._partial = False  # a step has updated some weights, but not all
        self._pending: dict[float, list[Update]] = {}  # by the factor of their learning rate
        self._pending_elements = 0
        self.m: dict[str, Array] = {}
        self.v: dict[str, Array] = {}
        self.make_moments()

    def make_moments(self) -> None:
        """Initializes the moments to 0."""
        for name in sorted(self.model.trainable):
            xp = namespace(self.model.params[name])
            self.m[name] = xp.zeros_like(self.model.params[name])
            self.v[name] = xp.zeros_like(self.model.params[name])

    def moments(self) -> dict[str, np.ndarray]:
        """The moments by their names in a checkpoint."""
        first = {f"m.{k}": to_numpy(x) for k, x in self.m.items()}
        return first | {f"v.{k}": to_numpy(x) for k, x in self.v.items()}

    def squares(self, grads: Mapping[str, Array]) -> float:
        """The sum of squares of these gradients, in float64; the order of the gradients does not matter."""
        return sum(sorted(self.model.engine.sum_of_squares(g) for g in grads.values()))

    def restore(self, moments: Mapping[str, np.ndarray], steps: int) -> None:
        """Restores saved moments and the step count. The caller restores the weights."""
        kinds = {"m": self.m, "v": self.v}
        check_moments(moments, {f"{kind}.{n}": tuple(x.shape) for kind, own in kinds.items() for n, x in own.items()})
        floats = self.model.engine.floats
        for kind, own in kinds.items():
            for name in own:
                own[name] = floats(moments[f"{kind}.{name}"].copy(), self.model.dtype)
        self.steps, self._partial = steps, False

    def check_parameters(self, names: Iterable[str]) -> None:
        """Raises ValueError for parameters that cannot be updated: no moments, another shape or dtype, read-only."""
        unknown = set(names).difference(self.m)
        if unknown:
            raise ValueError(
                f"{min(unknown)} was not trainable when this optimizer was created, so it has no moments; create a new "
                f"AdamW after add_lora(), or after any other change of the trainable parameters"
            )
        params = self.model.params
        for name in names:  # called at every step, so it must be fast
            p, m = params[name], self.m[name]
            if p.shape != m.shape or p.dtype != m.dtype:
                raise ValueError(
                    f"{name} is {p.dtype} {tuple(p.shape)}, but was {m.dtype} {tuple(m.shape)} when this optimizer "
                    f"was created; create a new AdamW"
                )
            if isinstance(p, np.ndarray) and not p.flags.writeable:
                raise ValueError(f"{name} is read-only and cannot be trained; replace it in params by a copy")

    def check(self, grads: Mapping[str, Array]) -> None:
        """Raises ValueError for gradients that do not match the parameters, before any parameter is updated."""
        self.check_parameters(grads)
        params = self.model.params
        for name, grad in grads.items():
            p = params[name]
            if isinstance(grad, np.ndarray) != isinstance(p, np.ndarray) or not hasattr(grad, "shape"):
                raise ValueError(f"the gradient of {name} is a {type(grad).__name__}, not an array like {name}")
            if grad.shape != p.shape:
                raise ValueError(f"the gradient of {name} has shape {tuple(grad.shape)}, expected {tuple(p.shape)}")
            if grad.dtype != p.dtype:
                raise ValueError(f"the gradient of {name} has dtype {grad.dtype}, expected {p.dtype}; convert it")

    @contextmanager
    def one_step(self, lr: float | None = None, scale: float = 1.0) -> Iterator[None]:
        """The context of one step's updates. Once the first is applied, Ctrl-C is delayed until the last.

        An error before the first update leaves the weights unchanged. An error after it leaves some weights updated
        and others not: then the next step raises ValueError.
        """
        if self._partial:
            raise ValueError(
                "the last step failed halfway: some weights were updated and others were not; reload the weights, and "
                "create a new AdamW or restore() this one"
            )
        self._lr, self._scale = self.lr if lr is None else lr, scale
        with delay_interrupt(lambda: self._partial):
            try:
                yield
                self.apply_pending()
            finally:
                self._pending, self._pending_elements = {}, 0
            self.steps += 1
            self._partial = False

    def step(self, grads: Mapping[str, Array], lr: float | None = None, scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient; `scale` multiplies all gradients."""
        self.check(grads)
        with self.one_step(lr, scale):
            for name, grad in grads.items():
                self.update(name, grad)

    def train_batch(
        self, model: Model, tokens: Any, targets: Any, segments: Any, dropout_seed: int | None, clip: float
    ) -> float:
        """`Model.train_step`: one step on one batch, with clipping; returns the loss before the step."""
        from onfoot.train.step import Microbatch, accumulated_step, fused_step

        if not clip >= 0:
            raise ValueError(f"clip must be >= 0 (0 disables clipping), got {clip}")
        self.check_parameters(model.trainable)
        batch = Microbatch(tokens, targets, segments, dropout_seed)
        if clip:
            return accumulated_step(model, self, [batch], None, None, clip, inputs.no_step)[0]
        return fused_step(model, self, batch, None, None, inputs.no_step, norm=False)[0]

    def update(self, name: str, g: Array) -> None:
        """Updates one parameter, at the latest when the step ends."""
        p = self.model.params[name]
        self.apply(name, p, g, self.m[name], self.v[name], decays=p.ndim > 1)

    def apply(self, name: str, p: Array, g: Array, m: Array, v: Array, decays: bool) -> None:
        """Queues the update of some elements of a parameter; applied once enough elements are queued."""
        of_rate = self._pending.setdefault(self.lr_scales.get(name, 1.0), [])
        of_rate.append((p, m, v, g, self.weight_decay if decays else 0.0))
        self._pending_elements += math.prod(p.shape)
        if self._pending_elements >= UPDATE_ELEMENTS:
            self.apply_pending()

    def apply_pending(self) -> None:
        """Applies the queued updates."""
        if not self._pending:
            return
        self._partial = True
        updates = self.model.engine.adamw_updates
        for lr_scale, pending in self._pending.items():
            updates(pending, self._lr * lr_scale, self.betas, self.eps, self.steps + 1, self._scale)
        self._pending, self._pending_elements = {}, 0


def check_moments(moments: Mapping[str, np.ndarray], expected: Mapping[str, Shape]) -> None:
    """Raises ValueError if saved moments do not have these names and shapes."""
    for key, shape in expected.items():
        if key not in moments:
            raise ValueError(f"the moment {key} is missing")
        saved = moments[key]
        if tuple(saved.shape) != shape:
            raise ValueError(f"the moment {key} has shape {tuple(saved.shape)}, expected {shape}")
        if saved.dtype.kind != "f":
            raise ValueError(f"the moment {key} has dtype {saved.dtype}, expected floating point")
    unknown = sorted(set(moments) - set(expected))
    if unknown:
        raise ValueError(f"the moment {unknown[0]} does not belong to a trainable parameter")


def global_norm(grads: Mapping[str, Array]) -> float:
    """The norm of all gradients as one vector, summed in float64."""
    return math.sqrt(sum(sum_of_squares(g) for g in grads.values()))


def clip_scale(norm: float, max_norm: float) -> float:
    """The factor that scales gradients of this norm to at most `max_norm`; 0 disables clipping."""
    return max_norm / norm if max_norm and norm > max_norm else 1.0  # eq CLIP.1
