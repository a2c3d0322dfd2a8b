"""The exponential moving average (EMA) of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.ops.update import correction

if TYPE_CHECKING:
    from onfoot.models.model import Model


class WeightAverage:
    """The average of the weights after each step, of which those of n steps ago count decayⁿ times as much."""

    def __init__(self, model: Model, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights: dict[str, Array] = {}
        self._raw: dict[str, Array] | None = None  # the weights that train, while the model has the average
        self.copy_weights()

    def copy_weights(self) -> None:
        """Starts from the model's current weights."""
        self.weights = {name: copy_of(self.model.params[name]) for name in sorted(self.model.trainable)}

    def update(self, steps: int) -> None:
        """Adds the weights after step 1, 2, ...; before the first, the average is that of the initial weights."""
        share = (1 - self.decay) / correction(self.decay, steps)  # eq EMA.1
        for name, average in self.weights.items():
            average += share * (self.model.params[name] - average)  # eq EMA.2

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the average for a while, in the same arrays; afterwards its weights are as before."""
        if self._raw is not None:  # it has it already
            yield
            return
        self._raw = raw = {name: copy_of(self.model.params[name]) for name in self.weights}
        try:
            self._set(self.weights)
            yield
        finally:
            self._set(raw)
            self._raw = None

    def raw(self) -> dict[str, np.ndarray]:
        """The weights that train, by name: what a checkpoint needs besides the average."""
        weights = self.model.params if self._raw is None else self._raw
        return {name: to_numpy(weights[name]) for name in self.weights}

    def restore(self, raw: Mapping[str, np.ndarray]) -> None:
        """The model has the average, from a checkpoint; this gives it the weights that train."""
        if set(raw) != set(self.weights) or any(raw[n].shape != tuple(w.shape) for n, w in self.weights.items()):
            raise ValueError("its trained weights do not match the parameters of this run")
        self.copy_weights()
        floats = self.model.engine.floats
        self._set({name: floats(raw[name].copy(), self.model.dtype) for name in self.weights})

    def _set(self, values: Mapping[str, Array]) -> None:
        for name in self.weights:
            self.model.params[name][...] = values[name]


def copy_of(x: Array) -> Array:
    """A copy of an array in its own memory."""
    return x.copy() if isinstance(x, np.ndarray) else x.clone()
