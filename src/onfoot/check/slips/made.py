"""How a slip is made: a `Mistake` with an unknown number, which is fitted, or one that depends on the case."""

from __future__ import annotations

import math
from collections.abc import Callable

from onfoot.check.layer import Layer, Mistake, Piece, Pieces

EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-9, 1e-10, 1e-4, 1e-3, 1e-2, 0.1, 0.0)
STARTS: dict[str, tuple[float, ...]] = {
    "eps": EPS,
    "theta": (500000.0, 1e6, 1e5, 1e3, 100.0, 10.0, 5e4),
    "lr": (1e-3, 1e-4, 0.1, 1.0, 0.02, 5e-3),
    "beta1": (0.8, 0.95, 0.99, 0.5, 0.1, 0.0),
    "beta2": (0.999, 0.99, 0.98, 0.9, 0.05, 0.5),
    "weight_decay": (0.01, 0.0, 0.05, 0.001, 0.2, 1.0),
}
COST = 1.15


def fitted(
    layer: Layer,
    name: str,
    parameter: str,
    starts: tuple[float, ...],
    fix: str,
    apply: Callable[..., dict[str, Piece]],
    cost: float = COST,
    correct: float | None = None,
) -> Mistake:
    """A mistake with an unknown number, which should be `correct`."""
    return Mistake(
        *(name, layer.name, "", "", fix, apply),
        parameter=parameter,
        starts=starts,
        cost=cost,
        replaces=frozenset(apply(layer.pieces, starts[0])),
        correct=correct,
    )


def small(value: float) -> float:
    """A number that is added against a division by 0; nan, which explains nothing, if it is not from 0 to 0.1."""
    return value if 0 <= value <= 0.1 else math.nan


def factor(value: float) -> float:
    """A number that multiplies; nan, which explains nothing, if it is 1 but for the last digits of float32."""
    return math.nan if abs(value - 1) < 1e-6 else value


def named(
    layer: Layer, name: str, fix: str, apply: Callable[..., dict[str, Piece]], *replaces: str, cost: float = COST
) -> Mistake:
    """A mistake whose constant depends on the case."""
    return Mistake(name, layer.name, "", "", fix, apply, per_case=True, cost=cost, replaces=frozenset(replaces))


def option(layer: Layer, name: str, wanted: float) -> Mistake:
    """Another value of an option than the one that was asked for."""
    usual = layer.options[name]

    def apply(p: Pieces, value: float) -> dict[str, Piece]:
        number = value if value >= 0 else math.nan  # a negative one explains nothing
        return {"given": lambda case, options: (case.inputs, {**options, name: number})}

    fix = f"use the {name} of the contract, {wanted:g}; or check with --{name.replace('_', '-')} if yours is intended"
    starts = STARTS[name] if wanted == usual else (usual, *STARTS[name])
    return fitted(layer, f"right with another {name}", name, starts, fix, apply, correct=wanted)
