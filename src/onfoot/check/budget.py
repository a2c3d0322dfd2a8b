"""The rounding budget: how far a correct implementation may differ, estimated from the conditioning of the formula.

Every piece of the backward pass gets randomly perturbed inputs. The spread of the results, divided by the size of the
perturbation, is the magnitude of a gradient: the size of the terms it sums, times their condition number. It is large
where terms cancel. A correct implementation rounds in other places, but by about as much as this formula, so a multiple
of rounding error times magnitude is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Case, Gradients, Layer, Pieces, is_float_array

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}  # the largest relative error of one rounding
DTYPES = ("float64", "float32")  # the most accurate first
ALLOWED = 64  # allowed error, in rounding errors of the magnitude
PERTURBATION = 2.0**-36  # well above float64 rounding, and small enough for a linear response
SAFE = 1e-200  # a sum of squares above it, and below its inverse, is accurate
RUNS = 6
RUNS_IF_LARGE = 2  # the norm of a large array is an average already

Run = Callable[[Pieces], Gradients]


def noisy(pieces: Pieces, rng: np.random.Generator) -> Pieces:
    """The same pieces with randomly perturbed inputs."""

    def perturbed(x: Any) -> Any:
        if is_float_array(x) and x.ndim:
            return x * (1 + PERTURBATION * math.sqrt(12) * (rng.random(x.shape) - 0.5))
        return x

    def wrap(piece: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: piece(*map(perturbed, arguments))

    return Pieces(**{name: piece if name == "route" else wrap(piece) for name, piece in vars(pieces).items()})


def magnitudes(run: Run, pieces: Pieces, runs: int = RUNS) -> list[float]:
    """The magnitude of each gradient: the norm of its change per unit of relative perturbation."""
    rng = np.random.default_rng(0)
    centre = run(pieces)
    off = [[distance(g, c) for g, c in zip(run(noisy(pieces, rng)), centre, strict=True)] for _ in range(runs)]
    return [norm(np.array(one)) / math.sqrt(runs) / PERTURBATION for one in zip(*off, strict=True)]


def norm(x: Array) -> float:
    """The Euclidean norm of the finite entries, without overflow."""
    if x.dtype == np.float64 and SAFE < (square := float(np.vdot(x, x))) < 1 / SAFE:
        return math.sqrt(square)  # all entries are finite, and no square overflowed
    x = x[np.isfinite(x)]
    largest = float(np.max(np.abs(x), initial=0))
    return largest * float(np.linalg.norm(x / largest)) if largest else 0.0


def distance(a: Array, b: Array) -> float:
    """The norm of a − b over the entries where both are finite."""
    return norm(a - b)


def layer_magnitudes(layer: Layer, case: Case, options: Mapping[str, Any]) -> list[float]:
    """The magnitudes of a layer's correct gradients."""
    return magnitudes_in_case(lambda pieces: layer.run(pieces, case, options), layer.pieces, layer, case)


def magnitudes_in_case(run: Run, pieces: Pieces, layer: Layer, case: Case) -> list[float]:
    """The magnitudes of the gradients that these pieces give, with the layer's own sensitivity."""
    found = magnitudes(run, pieces, RUNS_IF_LARGE if case.large else RUNS)
    if layer.sensitivity is None:
        return found
    roundings = layer.sensitivity(*case.inputs) / ALLOWED
    return [max(m, roundings * norm(g)) for m, g in zip(found, run(pieces), strict=True)]


def allowed(magnitude: float, dtype: str) -> float:
    """The largest error norm allowed for a correct implementation in this dtype."""
    return ALLOWED * UNIT[dtype] * magnitude
