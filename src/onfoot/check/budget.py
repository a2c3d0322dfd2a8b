"""How much a right implementation may be off: rounding, estimated from the condition of the formula itself.

Every piece of the backward pass is given inputs that are shaken a little, each time anew. The spread of the results,
over the size of the shaking, is the magnitude of a gradient: of the terms that it is the sum of, times their condition.
It is large where terms cancel. A right implementation rounds in other places but by as much as this formula does, so a
multiple of rounding error times magnitude is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}  # the largest relative error of one rounding
ALLOWED = 64  # times a rounding error of the magnitude
SHAKE = 2.0**-36  # well above rounding in float64, and small enough to be linear
RUNS = 6

Run = Callable[[Pieces], Gradients]


def noisy(pieces: Pieces, rng: np.random.Generator) -> Pieces:
    """The same pieces, their inputs shaken."""

    def shaken(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.ndim:
            return x * (1 + SHAKE * math.sqrt(12) * (rng.random(x.shape) - 0.5))
        return x

    def around(piece: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: piece(*map(shaken, arguments))

    return Pieces(**{name: around(piece) for name, piece in vars(pieces).items()})


def magnitudes(run: Run, pieces: Pieces) -> list[float]:
    """For each gradient, the norm of what shaking by 1 would change in it, if it were linear."""
    rng = np.random.default_rng(0)
    centre = run(pieces)
    off = [[distance(g, c) for g, c in zip(run(noisy(pieces, rng)), centre, strict=True)] for _ in range(RUNS)]
    return [norm(np.array(one)) / math.sqrt(RUNS) / SHAKE for one in zip(*off, strict=True)]


def norm(x: Array) -> float:
    """The root of the sum of squares of the finite entries, without overflow."""
    x = x[np.isfinite(x)]
    largest = float(np.max(np.abs(x), initial=0))
    return largest * float(np.linalg.norm(x / largest)) if largest else 0.0


def distance(a: Array, b: Array) -> float:
    """The norm of the difference over the entries where both are finite."""
    return norm(a - b)


def layer_magnitudes(layer: Layer, case: Case, options: Mapping[str, Any]) -> list[float]:
    """The magnitudes of a layer's right gradients."""
    return magnitudes(lambda pieces: layer.run(pieces, case, options), layer.pieces)


def allowed(magnitude: float, dtype: str) -> float:
    """The norm of the error that a right implementation in this dtype may have."""
    return ALLOWED * UNIT[dtype] * magnitude
