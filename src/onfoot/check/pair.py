"""A user's forward and backward pass as functions of float64 arrays, with estimates of their rounding errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onfoot.arrays import is_torch, to_numpy
from onfoot.check.budget import UNIT, norm
from onfoot.check.call import Answer, call, copy_argument
from onfoot.check.layer import Array, is_float_array
from onfoot.check.numeric import Derivative, derivative

PERTURBATIONS = 6


class Pair:
    """`forward(*inputs)` and `backward(*inputs, dout)`; with `saved`, onfoot's convention `backward(dout, saved)`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        inputs: Sequence[Any],
        wrt: Sequence[int] | None,
        names: Sequence[str] | None,
        saved: bool,
    ) -> None:
        self.forward, self.backward, self.saved = forward, backward, saved
        self.arrays = "torch" if any(is_torch(x) for x in inputs) else "numpy"
        arrays = [to_numpy(x) if hasattr(x, "__array__") and not isinstance(x, np.generic) else x for x in inputs]
        self.inputs = [x.astype(np.float64) if is_float_array(x) else x for x in arrays]
        self.wrt = [i for i, x in enumerate(self.inputs) if is_float_array(x)] if wrt is None else list(wrt)
        for i in self.wrt:
            if not is_float_array(self.inputs[i]):
                raise ValueError(f"argument {i} is not a floating-point array, so it has no gradient")
        if not self.wrt:
            raise ValueError("no input is a floating-point array: there is nothing to check")
        if names is not None and len(names) != len(self.wrt):
            raise ValueError(f"got {len(names)} names for {len(self.wrt)} gradients")
        self.names = [f"argument {i}" for i in self.wrt] if names is None else list(names)
        self.shapes = [self.inputs[i].shape for i in self.wrt]

    def value(self, inputs: Sequence[Any] | None = None) -> Array:
        """The output of the forward pass, in its own dtype."""
        returned = self.forward(*(copy_argument(x, self.arrays) for x in inputs or self.inputs))
        return to_numpy(returned[0] if self.saved else returned)

    def gradients(self, u: Array, dtype: str, inputs: Sequence[Any] | None = None) -> Answer:
        """Calls the backward pass with its inputs cast to `dtype`."""
        given = [x.astype(dtype) if is_float_array(x) else x for x in inputs or self.inputs]
        labels = [f"argument {i}" for i in range(len(given))]
        for name, i in zip(self.names, self.wrt, strict=True):
            labels[i] = name
        expected = list(zip(self.names, self.shapes, strict=True))
        function = self._backward_from_saved if self.saved else self.backward
        return call(function, [*given, np.asarray(u, dtype=dtype)], [*labels, "dout"], expected, {}, self.arrays)

    def _backward_from_saved(self, *arguments: Any) -> Any:
        *inputs, u = arguments
        returned = self.backward(u, self.forward(*inputs)[1])
        if isinstance(returned, tuple):  # None means no gradient, as for a missing bias
            returned = tuple(g for g in returned if g is not None)
        return returned

    def _perturbed(self, unit: float, rng: np.random.Generator) -> list[Any]:
        return [
            x * (1 + unit * rng.standard_normal(x.shape)) if i in self.wrt else x for i, x in enumerate(self.inputs)
        ]

    def noise(self, u: Array, rng: np.random.Generator) -> float:
        """The rounding error of ⟨u, forward⟩, estimated by perturbing the inputs by one rounding error."""
        y = self.value()
        unit = UNIT.get(str(y.dtype), UNIT["float64"])
        moved = [float(np.sum(u * (self.value(self._perturbed(unit, rng)) - y))) for _ in range(PERTURBATIONS)]
        return 2 * float(np.sqrt(np.mean(np.square(moved)))) + unit * norm(u * y)

    def spreads(self, u: Array, dtype: str, rng: np.random.Generator) -> list[Array]:
        """The rounding error of each entry of each gradient."""
        unit = UNIT[dtype]
        centre = self.gradients(u, "float64").gradients
        runs = [self.gradients(u, "float64", self._perturbed(unit, rng)).gradients for _ in range(PERTURBATIONS)]
        if centre is None or any(run is None for run in runs):
            return [np.zeros(shape) for shape in self.shapes]
        spreads = []
        for g, c in enumerate(centre):
            moved = np.sqrt(np.mean([(run[g] - c) ** 2 for run in runs if run is not None], axis=0))
            spreads.append(moved + unit * (np.abs(c) + norm(c) / np.sqrt(max(c.size, 1))))
        return spreads

    def scale(self, position: int) -> float:
        """The root mean square of an argument, which scales the steps."""
        x = self.inputs[self.wrt[position]]
        return norm(x) / float(np.sqrt(max(x.size, 1))) or 1.0

    def derivative(self, position: int, v: Array, u: Array, noise: float) -> Derivative:
        """⟨u, J v⟩ for one argument, by finite differences of the forward pass."""
        i = self.wrt[position]

        def moved(t: float) -> float:
            inputs = list(self.inputs)
            inputs[i] = self.inputs[i] + t * v
            return float(np.sum(u * self.value(inputs).astype(np.float64)))

        return derivative(moved, noise)
