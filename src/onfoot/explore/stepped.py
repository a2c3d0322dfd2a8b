"""AdamW steps of a large model without a copy of its weights.

Only the factors of each step's gradients are kept. When rows of a weight are read, the steps are taken again on these
rows, from the weight as the file has it: the same AdamW as `train.optimizer`, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.explore.factors import LazyGradients, lazy_gradients
from onfoot.explore.wide import Widened
from onfoot.models.store import Params
from onfoot.ops.update import adamw_update
from onfoot.quantized import FrozenWeight, Transposed, frozen_weight
from onfoot.train.optimizer import AdamW

if TYPE_CHECKING:
    from onfoot.models.model import Model

RowsOf = Callable[[Any], np.ndarray]  # rows -> that part of a gradient


class Settings(NamedTuple):
    """The constants of AdamW."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def settings(model: Model, lr: float) -> Settings:
    """Those of the library's optimizer."""
    frozen = copy.copy(model)
    frozen.trainable = set()
    own = AdamW(frozen, lr=lr)  # which has no moments, because nothing trains
    return Settings(own.lr, own.betas, own.eps, own.weight_decay)


class Replayed(NamedTuple):
    """The last of several steps: the weight before it, its gradient, both moments, and the weight after it."""

    w: np.ndarray
    gradient: np.ndarray
    m: np.ndarray
    v: np.ndarray
    new: np.ndarray


def replay(w: np.ndarray, gradients: Sequence[np.ndarray], adamw: Settings, decays: bool) -> Replayed:
    """Takes the steps again on some entries of a parameter."""
    new, m, v = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape)
    before = w
    decay = adamw.weight_decay if decays else 0.0
    for k, gradient in enumerate(gradients):
        before = new.copy() if k == len(gradients) - 1 else before
        adamw_update(new, m, v, gradient, adamw.lr, adamw.betas, adamw.eps, decay, k + 1)
    return Replayed(before, gradients[-1], m, v, new)


class Stepped(Widened):
    """A weight (out, in) after some steps."""

    def __init__(self, base: FrozenWeight, gradients: Sequence[RowsOf], adamw: Settings) -> None:
        super().__init__(base)
        self.gradients, self.adamw = gradients, adamw

    def floats(self, rows: Any, dtype: Any = np.float64) -> np.ndarray:
        return replay(super().floats(rows), [of(rows) for of in self.gradients], self.adamw, decays=True).new


def stepped(model: Model, steps: Sequence[Mapping[str, np.ndarray]], adamw: Settings) -> Model:
    """A frozen model after AdamW steps with these gradients of all its parameters. It shares the arrays of `model`."""
    params = Params(model.engine, model.dtype, model.params.shapes)
    for name, value in model.params.items():
        base = frozen_weight(value)
        if base is None:
            params[name] = replay(value, [grads[name] for grads in steps], adamw, decays=value.ndim > 1).new
            continue
        moved = Stepped(base, [rows_of(grads, name, isinstance(value, Transposed)) for grads in steps], adamw)
        params[name] = Transposed(moved) if isinstance(value, Transposed) else moved
    clone = copy.copy(model)
    clone._params = params
    return clone


def rows_of(grads: Mapping[str, np.ndarray], name: str, transposed: bool) -> RowsOf:
    """Rows of a weight's gradient, of the weight as (out, in)."""
    if isinstance(grads, LazyGradients):
        return lambda rows: grads.rows(name, rows)
    return lambda rows: (grads[name].T if transposed else grads[name])[rows]


class Steps:
    """AdamW steps on one text, from a frozen model on. `losses[k]` is the loss after k steps."""

    def __init__(self, model: Model, tokens: np.ndarray, targets: np.ndarray, divisor: float, lr: float) -> None:
        self.start, self.text = model, (tokens, targets, divisor)
        self.adamw = settings(model, lr)
        self.model = model
        self.losses: list[float] = []
        self.gradients: list[LazyGradients] = []

    def take(self, first: LazyGradients | None = None) -> None:
        """One step; `first` are the gradients at this point, if they are known."""
        grads = lazy_gradients(self.model, *self.text) if first is None else first
        self.gradients.append(grads)
        self.losses[len(self.gradients) - 1 :] = [grads.loss]
        self.model = stepped(self.start, self.gradients, self.adamw)

    def loss(self) -> float:
        """The loss after the last step."""
        tokens, targets, divisor = self.text
        return self.model.loss(tokens, targets, divisor=divisor)

    def last(self, name: str, rows: Any = ..., gradients: Sequence[LazyGradients] | None = None) -> Replayed:
        """The last step of one parameter in the shape of the file, or of some rows of the weight as (out, in)."""
        steps = self.gradients if gradients is None else gradients
        value = self.start.params[name]
        base = frozen_weight(value)
        if base is None:
            return replay(value[rows], [grads[name][rows] for grads in steps], self.adamw, value.ndim > 1)
        where = slice(None) if rows is ... else rows
        found = replay(base.floats(where, np.float64), [grads.rows(name, where) for grads in steps], self.adamw, True)
        return Replayed(*(x.T for x in found)) if isinstance(value, Transposed) else found

    def predicted(self, track: Callable[[Sequence[str]], Any]) -> float:
        """Σ ∂w ∘ (new w − w) of the last step over all parameters, a few rows at a time."""
        total = 0.0
        for name in track(list(self.start.params)):
            base = frozen_weight(self.start.params[name])
            for rows in [...] if base is None else base._chunks():
                found = self.last(name, rows)
                total += float((found.gradient * (found.new - found.w)).sum())
        return total
