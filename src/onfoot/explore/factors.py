"""The gradients of frozen weights, as the two thin arrays that each is the product of.

The gradient of a linear layer is xᵗ Δ, with one row of x and of Δ per token. A pass over a text keeps these, and a
gradient, or some of its rows, is multiplied out when it is asked for. Norms and dot products need no product.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.models.examples import Formed, PerExample, Product, Rows, Spans, Tied, example_pass
from onfoot.models.params import quantizable
from onfoot.models.step import checked_batch

if TYPE_CHECKING:
    from onfoot.models.model import Model


class Outer(NamedTuple):
    """Σ over rows of leftᵗ right, with the example that each row belongs to."""

    left: np.ndarray  # (N, P)
    right: np.ndarray  # (N, Q)
    example: np.ndarray  # (N,)


def outers(factor: PerExample) -> list[Outer]:
    """A gradient as sums of outer products; empty if its values exist."""
    if isinstance(factor, Tied):
        return [*outers(factor.head), *outers(factor.rows)]
    if isinstance(factor, Rows):
        one_hot = (factor.ids[:, None] == np.arange(factor.n_rows)).astype(factor.dy.dtype)  # (N, V)
        return [Outer(one_hot, factor.dy, _examples(factor.spans))]
    if isinstance(factor, Product):
        example = _examples(factor.spans)
        n = len(example)  # rows behind the last example are padding
        return [Outer(factor.left[:n], factor.right[:n], example)]
    return []


def _examples(spans: Spans) -> np.ndarray:
    return np.repeat(np.arange(spans.count), spans.lengths)


def dots(parts: PerExample, total: PerExample) -> np.ndarray:
    """The dot product of each example's gradient with that of one text, (E,)."""
    if isinstance(parts, Formed):
        whole = total.grads[0] if isinstance(total, Formed) else total.weighted(np.ones(1))
        return parts.grads.reshape(len(parts.grads), -1) @ np.asarray(whole).ravel()
    spans = (parts.head if isinstance(parts, Tied) else parts).spans  # type: ignore[attr-defined]
    out = np.zeros(spans.count)
    wanted = outers(total)
    for a in outers(parts):
        for b in wanted:
            of_row = ((a.left @ b.left.T) * (a.right @ b.right.T)).sum(axis=1)  # (N,)
            np.add.at(out, a.example, of_row)
        if isinstance(total, Formed):
            np.add.at(out, a.example, np.einsum("np,pq,nq->n", a.left, total.grads[0], a.right, optimize=True))
    return out


class LazyGradients(Mapping[str, np.ndarray]):
    """The gradient of every parameter by its name, in the shape of the file, computed when it is read."""

    def __init__(self, model: Model, factors: dict[str, PerExample], loss: float) -> None:
        self.factors, self.loss = factors, loss
        self.shapes = {name: tuple(model.params[name].shape) for name in model.params if name in factors}
        self._out_in = quantizable(model.config)  # weights, and whether each is stored (out, in)

    def __getitem__(self, name: str) -> np.ndarray:
        factor = self.factors[name]
        return factor.grads[0] if isinstance(factor, Formed) else np.asarray(factor.weighted(np.ones(1)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def rows(self, name: str, rows: Any) -> np.ndarray:
        """Rows of a weight's gradient, of the weight as (out, in); `rows` is a slice or an array of indices."""
        factor = self.factors[name]
        if isinstance(factor, Formed):
            value = factor.grads[0]
            return (value if self._out_in[name] else value.T)[rows]
        if isinstance(factor, Tied | Rows):
            return self._table_rows(factor, rows)
        assert isinstance(factor, Product)
        out, other = (factor.left, factor.right) if self._out_in[name] else (factor.right, factor.left)
        return np.tensordot(out[:, rows], other, axes=(0, 0))

    def _table_rows(self, factor: Tied | Rows, rows: Any) -> np.ndarray:
        """Rows of a token table's gradient: of the tokens read, and if tied, of all through the head."""
        read = factor.rows if isinstance(factor, Tied) else factor
        wanted = np.arange(read.n_rows)[rows]  # of any shape
        here = (wanted[..., None] == read.ids).astype(np.float64)  # (..., N)
        out = here @ read.dy
        if isinstance(factor, Tied):
            out += np.tensordot(factor.head.left[:, rows], factor.head.right, axes=(0, 0))
        return out

    def at(self, name: str, index: tuple[int, ...]) -> float:
        """One entry."""
        if name not in self._out_in:
            return float(self[name][index])
        row, column = index if self._out_in[name] else index[::-1]
        return float(self.rows(name, np.array([row]))[0, column])

    def norm(self, name: str) -> float:
        return float(np.sqrt(self.factors[name].squares()[0]))


def all_trainable(model: Model) -> Model:
    """The same model, of which every parameter has a gradient; it shares the arrays."""
    clone = copy.copy(model)
    clone.trainable = set(model.params)
    return clone


def lazy_gradients(model: Model, tokens: np.ndarray, targets: np.ndarray, divisor: float) -> LazyGradients:
    """The gradients of one text (1, T), in one pass."""
    passed = example_pass(all_trainable(model), checked_batch(model, tokens, targets, divisor))
    return LazyGradients(model, passed.factors, passed.loss)


def norm_of(grads: Mapping[str, np.ndarray], name: str) -> float:
    """The norm of a gradient, without forming it if it is lazy."""
    return grads.norm(name) if isinstance(grads, LazyGradients) else float(np.linalg.norm(grads[name]))


def entry_of(grads: Mapping[str, np.ndarray], name: str, at: tuple[int, ...]) -> float:
    """One entry of a gradient, without forming the others if it is lazy."""
    return grads.at(name, at) if isinstance(grads, LazyGradients) else float(grads[name][at])


def target_parts(
    model: Model, tokens: np.ndarray, targets: np.ndarray, divisor: float, chosen: np.ndarray
) -> dict[str, PerExample]:
    """The factors of each chosen target's part of the gradients: copies of the text, with one target each."""
    from onfoot.ops.cross_entropy import IGNORE

    copies = np.repeat(tokens, len(chosen), axis=0)  # (E, T)
    only = np.full_like(copies, IGNORE)
    only[np.arange(len(chosen)), chosen] = targets[0, chosen]
    return example_pass(all_trainable(model), checked_batch(model, copies, only, divisor)).factors
