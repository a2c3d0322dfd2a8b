"""Terms: how a cell of an array is computed from cells of other arrays, as data that the page can evaluate.

A term is a product of factors, or a sum over j of such products. A factor is a cell of another array, given by index
letters as in einsum: r and c are the row and column of the explained cell, j is summed over. So Δ_8 = Δ_9 w_8ᵗ is one
term over j with the factors Δ_9 at "rj" and w_8 at "cj". The cell is the sum of its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Factor:
    """A cell of another array. `power` −1 divides by it; `shift` is added to its column."""

    tensor: str
    at: str
    power: int = 1
    shift: int = 0

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"tensor": self.tensor, "at": self.at}
        if self.power != 1:
            out["power"] = self.power
        if self.shift:
            out["shift"] = self.shift
        return out


@dataclass(frozen=True)
class Term:
    """One term: its formula as text, its factors, and what j runs over if it is a sum."""

    label: str
    factors: tuple[Factor, ...]
    sign: int = 1
    over: str = ""

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"label": self.label, "factors": [factor.to_json() for factor in self.factors]}
        if self.sign != 1:
            out["sign"] = self.sign
        if self.over:
            out["over"] = self.over
        return out


def product(label: str, *factors: tuple[str, str] | Factor, sign: int = 1) -> Term:
    """A term that is a single product."""
    return Term(label, _factors(factors), sign)


def dot(label: str, over: str, *factors: tuple[str, str] | Factor, sign: int = 1) -> Term:
    """A term that is a sum over j."""
    return Term(label, _factors(factors), sign, over)


def _factors(given: Sequence[tuple[str, str] | Factor]) -> tuple[Factor, ...]:
    return tuple(f if isinstance(f, Factor) else Factor(*f) for f in given)


def evaluate(term: Term, shape: tuple[int, ...], value_of: Callable[[str], np.ndarray]) -> np.ndarray:
    """The value of the term in every cell of an array of that shape."""
    axes = "rc"[2 - len(shape) :]
    sizes = dict(zip(axes, shape, strict=True))
    arrays = []
    for factor in term.factors:
        array = np.asarray(value_of(factor.tensor), dtype=np.float64)
        if factor.at.endswith("c"):
            array = array[..., factor.shift : factor.shift + sizes["c"]]
        arrays.append(array if factor.power == 1 else array**factor.power)
    patterns = [factor.at for factor in term.factors]
    used = "".join(axis for axis in axes if any(axis in pattern for pattern in patterns))
    result = term.sign * np.einsum(f"{','.join(patterns)}->{used}", *arrays)
    for i, axis in enumerate(axes):
        if axis not in used:
            result = np.expand_dims(result, i)
    return np.broadcast_to(result, shape)
