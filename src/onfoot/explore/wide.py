"""Large models: weights stay as the file has them, and are widened to float64 a few rows at a time when they are used.

Every product, activation and error signal is computed in float64. No gradient of a weight is kept: the study computes
one by its formula when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore.proof import ScoresProbe
from onfoot.models.params import quantizable
from onfoot.models.store import Params
from onfoot.probe import Check, derivative
from onfoot.quantized import FrozenWeight, Transposed, frozen_weight

if TYPE_CHECKING:
    from onfoot.models.model import Model

SAMPLES = 128  # entries of a large gradient that a check moves: half at random, half the largest


class Widened(FrozenWeight):
    """A weight (out, in) in float32, 16 bits or quantized blocks, read as float64."""

    kind = "widened"

    def __init__(self, base: FrozenWeight | np.ndarray) -> None:
        self.base = base
        self.shape = (base.shape[0], base.shape[1])

    @property
    def arrays(self) -> list[np.ndarray]:
        return self.base.arrays if isinstance(self.base, FrozenWeight) else [self.base]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Widened:
        return Widened(self.base.map(function) if isinstance(self.base, FrozenWeight) else function(self.base))

    def floats(self, rows: Any, dtype: Any = np.float64) -> np.ndarray:
        if isinstance(self.base, FrozenWeight):
            return self.base.floats(rows, np.float64)
        return self.base[rows].astype(np.float64)

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.floats(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.floats(slice(None)).astype(dtype or np.float64, copy=False)


class Moved(Widened):
    """A weight with some of its entries moved."""

    def __init__(self, base: FrozenWeight, rows: np.ndarray, columns: np.ndarray, by: np.ndarray) -> None:
        super().__init__(base)
        self.rows, self.columns, self.by = rows, columns, by

    def floats(self, rows: Any, dtype: Any = np.float64) -> np.ndarray:
        out = super().floats(rows)
        asked = np.arange(self.shape[0])[rows]
        for row, column, by in zip(self.rows, self.columns, self.by, strict=True):
            out[asked == row, column] += by
        return out


def with_moved(value: Any, at: tuple[np.ndarray, np.ndarray], by: np.ndarray) -> Any:
    """A frozen weight in the shape of the file, with its entries at (rows, columns) moved."""
    base = frozen_weight(value)
    assert base is not None
    if isinstance(value, Transposed):
        return Transposed(Moved(base, *at[::-1], by))
    return Moved(base, *at, by)


def widen(model: Model) -> Model:
    """Makes a float32 model compute in float64 on the same weights, all of them frozen. Returns it."""
    tables = quantizable(model.config)
    params = Params(model.engine, "float64", model.params.shapes)
    for name, value in model.params.items():
        if name not in tables:
            params[name] = np.asarray(value, dtype=np.float64)
            continue
        base = frozen_weight(value)
        stored = Widened((value if tables[name] else value.T) if base is None else base)
        params[name] = stored if tables[name] else Transposed(stored)
    model._params, model.dtype, model.trainable = params, "float64", set()
    return model


class SampledProbe(ScoresProbe):
    """A probe that moves some entries of a frozen weight, instead of all of them."""

    def parameter(self, gradient: np.ndarray, name: str, where: Any = ...) -> Check:
        original = self.model.params[name]
        if frozen_weight(original) is None:
            return super().parameter(gradient, name, where)
        at = sampled(gradient, self.rng)
        self.sampled = len(at[0])
        rows, columns = (
            np.broadcast_to(index, original.shape)[where][at]
            for index in np.ogrid[: original.shape[0], : original.shape[1]]
        )
        direction = self.rng.standard_normal(len(rows))
        direction /= np.linalg.norm(direction)

        def loss(eps: float) -> float:
            self.model.params[name] = with_moved(original, (rows, columns), eps * direction)
            try:
                return self.model.loss(self.tokens, self.targets, divisor=self.divisor)
            finally:
                self.model.params[name] = original

        return Check(float(gradient[at] @ direction), derivative(loss))


def sampled(gradient: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The indices of `SAMPLES` entries of an array, or of all if it has no more: the largest, and others at random."""
    flat = np.abs(gradient).ravel()
    if flat.size <= SAMPLES:
        return np.unravel_index(np.arange(flat.size), gradient.shape)
    largest = np.argpartition(-flat, SAMPLES // 2)[: SAMPLES // 2]
    others = rng.choice(flat.size, SAMPLES // 2, replace=False)
    return np.unravel_index(np.unique(np.concatenate([largest, others])), gradient.shape)
