"""The arrays of a study by id: what each is, how its cells are computed, and how a gradient is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore.terms import Term, evaluate
from onfoot.tables import NOTHING, Formula

if TYPE_CHECKING:
    from onfoot.explore.autograd import Autograd
    from onfoot.probe import Check, Probe

TOKEN, FEATURE, VOCABULARY, POSITION = "token", "feature", "vocabulary", "position"  # kinds of axes


def finite_norm(value: np.ndarray) -> float:
    """The Frobenius norm without the −∞ of a mask."""
    return float(np.linalg.norm(value[np.isfinite(value)]))


@dataclass
class Tensor:
    """One array of up to two axes, computed on first use."""

    id: str
    symbol: str
    make: Callable[[], Any]
    axes: tuple[str, ...]
    formula: Formula = NOTHING
    terms: tuple[Term, ...] = ()
    note: str = ""
    rows: np.ndarray | None = None  # the indices of its rows and columns, if it has only some of them
    columns: np.ndarray | None = None
    all_of_it: Callable[[], np.ndarray] | None = None  # the array with all its rows and columns, if it has only some
    row_labels: list[str] | None = None  # if the rows are neither tokens nor features
    parameter: str | None = None  # the name of the parameter that it is, or is the gradient of
    measure: Callable[[Probe], Check] | None = None  # the check by finite differences; gradients only
    differentiate: Callable[[Autograd], np.ndarray] | None = None  # the same gradient by autograd; gradients only
    known_shape: tuple[int, ...] | None = None  # if it is known before the array is computed
    part: str = ""  # which part of the parameter it is, if not all of it
    family: str = "gpt2"
    transient: bool = False  # True: computed at each use, because keeping it would cost too much memory
    _value: np.ndarray | None = None

    @property
    def value(self) -> np.ndarray:
        if self._value is not None:
            return self._value
        value = np.asarray(self.make(), dtype=np.float64)
        if not self.transient:
            self._value = value
        return value

    @property
    def whole(self) -> np.ndarray:
        """The array with all its rows and columns, also if only some are shown; computed at each use."""
        return self.value if self.all_of_it is None else np.asarray(self.all_of_it(), dtype=np.float64)

    @property
    def norm(self) -> float:
        """The Frobenius norm of the whole array, without the −∞ of a mask."""
        return finite_norm(self.whole)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape if self.known_shape is None else self.known_shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_gradient(self) -> bool:
        return self.measure is not None


class Tensors:
    """All arrays of a study, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_id: dict[str, Tensor] = {}

    def add(self, tensor: Tensor) -> str:
        if tensor.id in self._by_id:
            raise ValueError(f"array {tensor.id!r} already exists")
        self._by_id[tensor.id] = tensor
        return tensor.id

    def remove(self, id: str) -> None:
        del self._by_id[id]

    def __getitem__(self, id: str) -> Tensor:
        if id not in self._by_id:
            raise KeyError(f"unknown array {id!r}")
        return self._by_id[id]

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def value(self, id: str) -> np.ndarray:
        return self[id].value

    def sum_of_terms(self, id: str) -> np.ndarray:
        """The sum of an array's terms; equal to the array if its terms are right."""
        tensor = self[id]
        total = np.zeros(tensor.value.shape)
        for term in tensor.terms:
            total = total + evaluate(term, tensor.value.shape, self.value)
        return total
