"""Gradients per example: the norm of each example's gradient, mostly without forming it.

The gradient of a linear layer's weight is Xᵗ Δ: a sum over rows. The rows of one example give its gradient, and its
norm follows from X and Δ. So the model runs once, unchanged, on an engine whose backward functions return these factors
instead of their product (`example_engine`). Here is what the factors of each kind of parameter give: every example's
squared norm, its gradient, and a weighted sum over the examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from onfoot.arrays import Array, Shape, is_torch, namespace, scatter_add, zeros_like_shape
from onfoot.engine import Engine
from onfoot.ops.cross_entropy import IGNORE

if TYPE_CHECKING:
    from onfoot.models.model import Model
    from onfoot.models.step import Batch


@dataclass(frozen=True)
class Spans:
    """The rows of each example, among the N rows of an array: begin[e], ..., end[e] − 1."""

    begin: np.ndarray  # (E,)
    end: np.ndarray  # (E,)

    def __iter__(self) -> Iterator[slice]:
        return (slice(int(a), int(e)) for a, e in zip(self.begin, self.end, strict=True))

    @property
    def count(self) -> int:
        return self.begin.size

    @property
    def longest(self) -> int:
        return int((self.end - self.begin).max())

    def spread(self, weights: np.ndarray, n: int) -> np.ndarray:
        """Each row's weight: that of its example, 0 for rows of no example, (N,)."""
        out = np.zeros(n)
        for rows, weight in zip(self, weights, strict=True):
            out[rows] = weight
        return out


class PerExample(Protocol):
    """The gradient of one parameter, one per example."""

    def squares(self) -> np.ndarray:
        """The squared norm of each example's gradient, (E,), in float64."""

    def each(self) -> Array:
        """Every example's gradient, (E, *shape)."""

    def weighted(self, weights: np.ndarray) -> Array:
        """Σ weights[e] G_e over the examples."""


class Formed:
    """Gradients that exist, (E, *shape): of biases and norms, and where they are smaller than their factors."""

    def __init__(self, engine: Engine, grads: Array) -> None:
        self.engine, self.grads = engine, grads

    def squares(self) -> np.ndarray:
        return np.array([self.engine.sum_of_squares(g) for g in self.grads])

    def each(self) -> Array:
        return self.grads

    def weighted(self, weights: np.ndarray) -> Array:
        flat = self.grads.reshape(len(weights), -1)
        scale = self.engine.floats(weights[None], str(flat.dtype).removeprefix("torch."))  # (1, E)
        return (scale @ flat).reshape(tuple(self.grads.shape[1:]))

    def __setitem__(self, columns: slice, value: float) -> None:
        self.grads[..., columns] = value


class Product:
    """Xᵗ Δ per example: the gradient of a linear layer's weight, from its input and its upstream gradient."""

    def __init__(self, engine: Engine, spans: Spans, left: Array, right: Array) -> None:
        self.engine, self.spans, self.left, self.right = engine, spans, left, right  # (N, P) and (N, Q)

    @property
    def T(self) -> Product:  # noqa: N802
        return Product(self.engine, self.spans, self.right, self.left)

    @property
    def shape(self) -> Shape:
        return self.left.shape[1], self.right.shape[1]

    def squares(self) -> np.ndarray:
        return np.array([self._square(self.left[rows], self.right[rows]) for rows in self.spans])

    def _square(self, x: Array, dy: Array) -> float:
        t, (p, q) = x.shape[0], self.shape
        if t == 0:
            return 0.0
        if t * (p + q) < p * q:
            return max(0.0, dot(gram(self.engine, x), gram(self.engine, dy)))  # eq EX.1  (X Xᵗ) · (Δ Δᵗ)
        return self.engine.sum_of_squares(self.engine.weight_gradient(x, dy))  # eq EX.2  ‖Xᵗ Δ‖²

    def each(self) -> Array:
        out = zeros_like_shape((self.spans.count, *self.shape), self.left)
        for grad, rows in zip(out, self.spans, strict=True):
            if rows.stop > rows.start:
                grad[...] = self.engine.weight_gradient(self.left[rows], self.right[rows])  # eq EX.2
        return out

    def weighted(self, weights: np.ndarray) -> Array:
        left, right, spans = self.left, self.right, self.spans
        if left.shape[1] <= right.shape[1]:
            left = scaled(self.engine, spans, left, weights)
        else:
            right = scaled(self.engine, spans, right, weights)
        return self.engine.weight_gradient(left, right)  # eq EX.7  Xᵗ (w ∘ Δ)

    def compact(self) -> Product | Formed:
        """The gradients themselves if these are smaller than their factors, as for LoRA and for long examples."""
        p, q = self.shape
        return Formed(self.engine, self.each()) if p * q <= self.spans.longest * (p + q) else self


class Rows:
    """The gradient of an embedding table per example: each token adds its row of Δ to the row of its id."""

    def __init__(self, engine: Engine, spans: Spans, ids: Array, dy: Array, n_rows: int) -> None:
        self.engine, self.spans, self.ids, self.dy, self.n_rows = engine, spans, ids, dy, n_rows  # (N,), (N, C)

    def squares(self) -> np.ndarray:
        return np.array([self._square(self.ids[rows], self.dy[rows]) for rows in self.spans])

    def _square(self, ids: Array, dy: Array) -> float:
        same = ids[:, None] == ids[None, :]  # (T, T): pairs of the same token
        return max(0.0, dot(gram(self.engine, dy), same))  # eq EX.4

    def each(self) -> Array:
        parts = [scatter_add(self.n_rows, self.ids[rows], self.dy[rows]) for rows in self.spans]  # eq 3
        return namespace(self.dy).stack(parts)

    def weighted(self, weights: np.ndarray) -> Array:
        return scatter_add(self.n_rows, self.ids, scaled(self.engine, self.spans, self.dy, weights))  # eq 3

    def compact(self) -> Rows:
        return self


class Tied:
    """The gradient of a token table that is also the head: the sum of both paths, per example."""

    def __init__(self, head: Product, rows: Rows) -> None:
        self.head, self.rows = head, rows  # head: D (N, V) and h (N, C)

    def squares(self) -> np.ndarray:
        pairs = zip(self.head.spans, self.rows.spans, strict=True)
        cross = np.array([self._cross(head, rows) for head, rows in pairs])
        return np.maximum(0.0, self.head.squares() + self.rows.squares() + 2 * cross)  # eq EX.5

    def _cross(self, head: slice, rows: slice) -> float:
        if head.stop == head.start:
            return 0.0
        at_tokens = self.head.left[head][:, self.rows.ids[rows]]  # D[t, token s], (T', T)
        products = matmul(self.rows.engine, self.head.right[head], self.rows.dy[rows].T)  # h_t · δ_s, (T', T)
        return dot(at_tokens, products)  # eq EX.6

    def each(self) -> Array:
        return self.head.each() + self.rows.each()  # eq TIE.1

    def weighted(self, weights: np.ndarray) -> Array:
        total = self.head.weighted(weights)
        dy = scaled(self.rows.engine, self.rows.spans, self.rows.dy, weights)
        if is_torch(total):
            return total.index_add_(0, self.rows.ids, dy)
        np.add.at(total, self.rows.ids, dy)  # eq TIE.1
        return total

    def compact(self) -> Tied | Formed:
        head = self.head.compact()
        return Formed(head.engine, head.grads + self.rows.each()) if isinstance(head, Formed) else self


def matmul(engine: Engine, x: Array, y: Array) -> Array:
    """x y by the engine's product: a linear layer without a bias."""
    return engine.frozen_linear_forward(x, y)[0]


def gram(engine: Engine, x: Array) -> Array:
    """x xᵗ: the dot products of all pairs of rows, (T, T)."""
    return matmul(engine, x, x.T)


def dot(x: Array, y: Array) -> float:
    """Σ x ∘ y, in float64."""
    if is_torch(x):
        return float((x.double() * y).sum())
    return float(np.einsum("ij,ij->", x, y, dtype=np.float64))


def sums(engine: Engine, spans: Spans, x: Array) -> Formed:
    """Σ over the rows of each example, (E, C): the gradient of a bias, or of a norm's weight."""
    return Formed(engine, namespace(x).stack([engine.sum_first(x[rows]) for rows in spans]))  # eq EX.3


def scaled(engine: Engine, spans: Spans, x: Array, weights: np.ndarray) -> Array:
    """The rows of x (N, C), multiplied by the weights of their examples."""
    of_row = spans.spread(weights, x.shape[0])[:, None]  # (N, 1)
    return x * engine.floats(of_row, str(x.dtype).removeprefix("torch."))


class Examples(NamedTuple):
    """The result of one pass: the loss of the batch, and the factors of every trainable parameter's gradients."""

    loss: float
    n_targets: np.ndarray  # (E,), each example's targets
    factors: dict[str, PerExample]

    def norms(self) -> np.ndarray:
        """The norm of each example's gradient over all trainable parameters, (E,), in float64."""
        total = np.zeros(self.n_targets.size)
        for factor in self.factors.values():
            total += factor.squares()
        return np.sqrt(total)

    def weighted(self, weights: np.ndarray, on_gradient: Callable[[str, Array], None]) -> None:
        """Calls `on_gradient` with Σ weights[e] G_e of every parameter. Factors are dropped as they are used."""
        for name in list(self.factors):
            on_gradient(name, self.factors.pop(name).weighted(weights))


def spans_of(batch: Batch) -> tuple[Spans, Spans, np.ndarray]:
    """Each example's rows among all tokens and among those that the head computes, and its number of targets."""
    (b, t), positions = batch.tokens.shape, batch.layout.positions
    begin = np.arange(b) * t if positions.ndim == 1 else np.flatnonzero(positions.reshape(-1) == 0)
    every = Spans(begin, np.append(begin[1:], b * t))
    targets = np.flatnonzero(batch.targets.ids.reshape(-1) != IGNORE)
    with_target = Spans(np.searchsorted(targets, every.begin), np.searchsorted(targets, every.end))
    n_targets = with_target.end - with_target.begin
    return every, every if batch.targets.rows is None else with_target, n_targets


def example_pass(model: Model, batch: Batch) -> Examples:
    """Runs the model once, forward and backward, on an engine that keeps the factors of every gradient."""
    from onfoot.models.example_engine import example_run

    every, of_head, n_targets = spans_of(batch)
    run, factors = example_run(model, batch.dropout_seed, every, of_head)
    loss = model._unrecorded(run, batch)
    return Examples(loss, n_targets, factors)


def example_norms(model: Model, batch: Batch) -> np.ndarray:
    """The norm of each example's gradient over all trainable parameters, (E,)."""
    return example_pass(model, batch).norms()


def example_grads(model: Model, batch: Batch, names: Sequence[str] | None) -> dict[str, Array]:
    """Each example's gradient of the named parameters, (E, *shape); by default, of all trainable ones."""
    if isinstance(names, str):
        raise ValueError(f"names must be a list of parameters, got the string {names!r}; pass [{names!r}]")
    wanted = sorted(model.trainable) if names is None else list(names)
    for name in wanted:
        if name not in model.trainable:
            what = "is frozen" if name in model.params else "is not a parameter of this model"
            raise ValueError(f"{name!r} {what}; names must be among the trainable parameters (model.trainable)")
    _check_memory(model.params, wanted, spans_of(batch)[0].count, model.dtype)
    factors = example_pass(model, batch).factors
    return {name: factors[name].each() if name in factors else _zeros(model, name, batch) for name in wanted}


def _zeros(model: Model, name: str, batch: Batch) -> Array:
    count = spans_of(batch)[0].count
    return zeros_like_shape((count, *model.params[name].shape), model.params[name])


def _check_memory(params: Mapping[str, Any], names: Sequence[str], count: int, dtype: str) -> None:
    """Raises ValueError if the gradients of all examples would take more than half of the machine's memory."""
    size = count * sum(int(np.prod(params[name].shape)) for name in names) * np.dtype(dtype).itemsize
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if hasattr(os, "sysconf") else 8 << 30
    if size > limit:
        raise ValueError(
            f"the gradients of {count:,} examples of {len(names):,} parameters take {size / 1e9:.1f} GB, more than "
            f"half of this machine's memory ({limit / 1e9:.1f} GB); pass fewer examples or fewer names, or use "
            f"example_norms, which does not form them"
        )
