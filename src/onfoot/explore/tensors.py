"""The arrays of one study by id: what each is, how a cell of it is made, and how its gradient is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore.terms import Term, evaluate
from onfoot.tables import NOTHING, Formula

if TYPE_CHECKING:
    from onfoot.explore.autograd import Autograd
    from onfoot.probe import Check, Probe

TOKEN, FEATURE, VOCABULARY, POSITION = "token", "feature", "vocabulary", "position"  # what an axis counts


@dataclass
class Tensor:
    """One array of up to two axes. It is computed when it is first looked at."""

    id: str
    symbol: str
    make: Callable[[], Any]
    axes: tuple[str, ...]
    formula: Formula = NOTHING
    terms: tuple[Term, ...] = ()
    note: str = ""
    rows: np.ndarray | None = None  # the indices of the rows, and of the columns, where not all are here
    columns: np.ndarray | None = None
    row_labels: list[str] | None = None  # where the rows are neither tokens nor features
    parameter: str | None = None  # the tensor of the model's files that it is, or is the gradient of
    measure: Callable[[Probe], Check] | None = None  # the finite difference that a gradient must agree with
    differentiate: Callable[[Autograd], np.ndarray] | None = None  # the same gradient by autograd

    @cached_property
    def value(self) -> np.ndarray:
        return np.asarray(self.make(), dtype=np.float64)

    @property
    def is_gradient(self) -> bool:
        return self.measure is not None


class Tensors:
    """All arrays of a study, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_id: dict[str, Tensor] = {}

    def add(self, tensor: Tensor) -> str:
        if tensor.id in self._by_id:
            raise ValueError(f"the array {tensor.id!r} is there already")
        self._by_id[tensor.id] = tensor
        return tensor.id

    def remove(self, id: str) -> None:
        del self._by_id[id]

    def __getitem__(self, id: str) -> Tensor:
        if id not in self._by_id:
            raise KeyError(f"there is no array {id!r}")
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
        """What the terms of an array add up to: the array itself, where its terms are right."""
        tensor = self[id]
        total = np.zeros(tensor.value.shape)
        for term in tensor.terms:
            total = total + evaluate(term, tensor.value.shape, self.value)
        return total
