"""Recognises factors: a number that equals √d_k in every case is named √d_k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

CONSTANTS = {"2": 2.0, "3": 3.0, "4": 4.0}

KNOWN = {
    "log₂ e": math.log2(math.e),
    "ln 2": math.log(2),
    "√2": math.sqrt(2),
    "π": math.pi,
    "√(2/π)": math.sqrt(2 / math.pi),
}


def constant_words(factor: float) -> str:
    """The number, with the name of the constant that it is or that it is 1 divided by, if it is a known one."""
    for name, value in KNOWN.items():
        for shown, number in ((name, value), (f"1/{name}", 1 / value)):
            if math.isclose(abs(factor), number, rel_tol=1e-7):
                return f"{'−' if factor < 0 else ''}{shown} = {factor:.6g}"
    return f"{factor:.6g}"


def candidates(sizes: Mapping[str, float]) -> dict[str, float]:
    """Quantities that a gradient may be wrong by, the simplest first."""
    if "B·n" not in sizes and {"B", "n"} <= set(sizes):  # all tokens of a batch
        sizes = {**sizes, "B·n": sizes["B"] * sizes["n"]}
    found: dict[str, float] = {}
    for name, size in sizes.items():
        found[name] = size
    for name, size in sizes.items():
        if "·" in name:
            found[f"√({name})"] = math.sqrt(size)
        elif name.isidentifier():
            found[f"√{name}"] = math.sqrt(size)
    for name, size in sizes.items():
        if name.isidentifier() and "·" not in name:
            found[f"{name}²"] = size * size
    for name, size in sizes.items():
        if name.isidentifier():
            found[f"({name} − 1)"] = size - 1
            found[f"{name}/({name} − 1)"] = size / (size - 1) if size != 1 else math.inf
            found[f"({name} + 1)/{name}"] = (size + 1) / size
    return {**found, **CONSTANTS}


def recognise(measured: Sequence[tuple[Mapping[str, float], float]], tolerance: float) -> tuple[str, bool] | None:
    """Returns (name, times) of a factor that matches in every case; `times` is False if the gradient is divided by it.

    `measured` holds the sizes of each case and the factor found there. The name "" means a factor of 1.
    """

    def agrees(value: float, factor: float) -> bool:
        return math.isclose(value, factor, rel_tol=tolerance)

    if all(agrees(1.0, factor) for _, factor in measured):
        return "", True
    for name in candidates(measured[0][0]):
        values = [(candidates(sizes).get(name, math.nan), factor) for sizes, factor in measured]
        if all(agrees(value, factor) for value, factor in values):
            return name, True
        if all(value and agrees(1 / value, factor) for value, factor in values):
            return name, False
    return None
