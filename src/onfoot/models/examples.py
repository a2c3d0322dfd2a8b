"""Gradients per example: the norm of each example's gradient, mostly without forming it.

The gradient of a linear layer's weight is Xᵗ Δ: a sum over rows. The rows of one example give its gradient, and its
norm follows from X and Δ. So the model runs once, unchanged, on an engine whose backward functions return these factors
instead of their product (`example_engine`). Here is what the factors of each kind of parameter give: every example's
squared norm, its gradient, and a weighted sum over the examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from onfoot.arrays import Array, Shape, is_torch, namespace, scatter_add, to_numpy, zeros_like_shape
from onfoot.engine import Engine
from onfoot.models.step import Batch, unrecorded_loss
from onfoot.ops.cross_entropy import IGNORE
from onfoot.threads import one_blas_thread

if TYPE_CHECKING:
    from onfoot.models.model import Model


ROWS = 2048  # rows of short examples whose products are computed together
SMALL = 1 << 16  # elements of an array that is not worth several threads
LONG = 128  # tokens: longer examples are computed one at a time, each product on all threads


class Group(NamedTuple):
    """Consecutive examples, as blocks of rows of the same length: shorter examples are padded with zeros."""

    examples: slice
    rows: Array  # (G, T), indices
    padding: Array | None  # (G, T), True for rows that belong to no example; None: all do

    def take(self, x: Array) -> Array:
        """The rows of x (N, C), (G, T, C)."""
        g, t = self.rows.shape
        if self.padding is None:
            return x[int(self.rows[0, 0]) :][: g * t].reshape(g, t, x.shape[-1])
        out = x[self.rows]
        out[self.padding] = 0
        return out

    def columns(self, x: Array, ids: Array) -> Array:
        """x[t, ids[s]] for the rows t of an example and its tokens s, (N, V) (G, S) -> (G, T, S); 0 in padding."""
        out = x[self.rows[:, :, None], ids[:, None, :]]
        if self.padding is not None:
            out[self.padding] = 0
        return out


@dataclass(frozen=True)
class Spans:
    """The rows of each example, among the N rows of an array: begin[e], ..., end[e] − 1, one example after another."""

    begin: np.ndarray  # (E,)
    end: np.ndarray  # (E,)
    together: int  # examples per group

    @property
    def count(self) -> int:
        return self.begin.size

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.end - self.begin

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def groups(self) -> list[Group]:
        """The examples in groups: few large products instead of many small ones."""
        starts = range(0, self.count, self.together)
        return [self._group(slice(a, min(a + self.together, self.count))) for a in starts]

    def _group(self, examples: slice) -> Group:
        begin, lengths = self.begin[examples, None], self.lengths[examples, None]  # (G, 1)
        offsets = np.arange(max(1, lengths.max()))  # at least one row, of padding
        padding = offsets >= lengths  # (G, T)
        return Group(examples, np.where(padding, 0, begin + offsets), padding if padding.any() else None)

    def spread(self, weights: np.ndarray, n: int) -> np.ndarray:
        """Each row's weight: that of its example, 0 for rows behind the last example, (N,)."""
        out = np.zeros(n)
        out[: self.end[-1]] = np.repeat(weights, self.lengths)
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
        return squares(self.engine, self.grads)

    def each(self) -> Array:
        return self.grads

    def weighted(self, weights: np.ndarray) -> Array:
        flat = self.grads.reshape(len(weights), -1)
        scale = self.engine.floats(weights, str(flat.dtype).removeprefix("torch."))  # (E,)
        return namespace(flat).einsum("e,ei->i", scale, flat).reshape(tuple(self.grads.shape[1:]))  # eq EX.7

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
        return np.concatenate([self._squares(g.take(self.left), g.take(self.right)) for g in self.spans.groups])

    def _squares(self, x: Array, dy: Array) -> np.ndarray:
        t, (p, q) = x.shape[1], self.shape
        if t * (p + q) < p * q:
            return np.maximum(0.0, dots(gram(self.engine, x), gram(self.engine, dy)))  # eq EX.1  (X Xᵗ) · (Δ Δᵗ)
        return squares(self.engine, products(self.engine, x, dy))  # eq EX.2  ‖Xᵗ Δ‖²

    def each(self) -> Array:
        out = zeros_like_shape((self.spans.count, *self.shape), self.left)
        for group in self.spans.groups:
            out[group.examples] = products(self.engine, group.take(self.left), group.take(self.right))  # eq EX.2
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
        return np.concatenate([self._squares(group) for group in self.spans.groups])

    def _squares(self, group: Group) -> np.ndarray:
        ids = group.take(self.ids[:, None])  # (G, T, 1)
        same = ids == ids.swapaxes(1, 2)  # (G, T, T): pairs of the same token
        return np.maximum(0.0, dots(gram(self.engine, group.take(self.dy)), same))  # eq EX.4

    def each(self) -> Array:
        parts = [
            scatter_add(self.n_rows, self.ids[a:e], self.dy[a:e])
            for a, e in zip(self.spans.begin, self.spans.end, strict=True)
        ]  # eq 3
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
        pairs = zip(self.head.spans.groups, self.rows.spans.groups, strict=True)
        cross = np.concatenate([self._cross(head, rows) for head, rows in pairs])
        return np.maximum(0.0, self.head.squares() + self.rows.squares() + 2 * cross)  # eq EX.5

    def _cross(self, head: Group, rows: Group) -> np.ndarray:
        h, dy = head.take(self.head.right), rows.take(self.rows.dy)  # (G, T', C), (G, T, C)
        at_tokens = head.columns(self.head.left, rows.take(self.rows.ids[:, None])[..., 0])  # D[t, k_s], (G, T', T)
        return dots(at_tokens, pairwise(self.rows.engine, h, dy))  # eq EX.6

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


def products(engine: Engine, x: Array, dy: Array) -> Array:
    """xᵗ dy per example, (G, T, P) (G, T, Q) -> (G, P, Q)."""
    return engine.weight_gradient(x[0], dy[0])[None] if x.shape[0] == 1 else x.swapaxes(1, 2) @ dy


def pairwise(engine: Engine, x: Array, y: Array) -> Array:
    """x yᵗ per example: the dot products of all pairs of rows, (G, S, C) (G, T, C) -> (G, S, T)."""
    return matmul(engine, x[0], y[0].T)[None] if x.shape[0] == 1 else x @ y.swapaxes(1, 2)


def gram(engine: Engine, x: Array) -> Array:
    """x xᵗ per example, (G, T, T)."""
    return pairwise(engine, x, x)


def dots(x: Array, y: Array) -> np.ndarray:
    """Σ x ∘ y per example, (G,), in float64."""
    if is_torch(x):
        return to_numpy((x.double() * y).sum((1, 2)))
    return np.einsum("gij,gij->g", x, y, dtype=np.float64)


def squares(engine: Engine, x: Array) -> np.ndarray:
    """Σ x² per example, (E,), in float64."""
    if is_torch(x) or x[0].size > SMALL:
        return np.array([engine.sum_of_squares(one) for one in x])
    flat = x.reshape(x.shape[0], -1)
    return np.einsum("ei,ei->e", flat, flat, dtype=np.float64)


def sums(engine: Engine, spans: Spans, x: Array) -> Formed:
    """Σ over the rows of each example, (E, C): the gradient of a bias, or of a norm's weight."""
    if spans.together == 1:
        parts = [engine.sum_first(g.take(x)[0])[None] for g in spans.groups]
    else:
        parts = [g.take(x).sum(axis=1) for g in spans.groups]
    return Formed(engine, namespace(x).concatenate(parts))  # eq EX.3


def scaled(engine: Engine, spans: Spans, x: Array, weights: np.ndarray) -> Array:
    """The rows of x (N, C), multiplied by the weights of their examples."""
    of_row = spans.spread(weights, x.shape[0])[:, None]  # (N, 1)
    return x * engine.floats(of_row, str(x.dtype).removeprefix("torch."))


class Examples(NamedTuple):
    """The result of one pass: the loss of the batch, and the factors of every trainable parameter's gradients."""

    loss: float
    n_targets: np.ndarray  # (E,), each example's targets
    factors: dict[str, PerExample]
    threads: int  # parameters whose norms are computed at the same time

    def norms(self) -> np.ndarray:
        """The norm of each example's gradient over all trainable parameters, (E,), in float64."""
        if self.threads == 1:
            squares = [factor.squares() for factor in self.factors.values()]
        else:
            with one_blas_thread(), ThreadPoolExecutor(self.threads) as pool:
                squares = list(pool.map(lambda factor: factor.squares(), self.factors.values()))
        return np.sqrt(np.sum(squares, axis=0) if squares else np.zeros(self.n_targets.size))

    def weighted(self, weights: np.ndarray, on_gradient: Callable[[str, Array], None]) -> None:
        """Calls `on_gradient` with Σ weights[e] G_e of every parameter. Factors are dropped as they are used."""
        with nullcontext() if self.threads == 1 else one_blas_thread():
            for name in list(self.factors):
                on_gradient(name, self.factors.pop(name).weighted(weights))


def spans_of(batch: Batch) -> tuple[Spans, Spans, np.ndarray]:
    """Each example's rows among all tokens and among those that the head computes, and its number of targets."""
    begin = batch.example_begins
    end = np.append(begin[1:], batch.tokens.size)
    longest = int((end - begin).max())
    together = 1 if longest > LONG else ROWS // longest
    targets = np.flatnonzero(batch.targets.ids.reshape(-1) != IGNORE)
    every = Spans(begin, end, together)
    with_target = Spans(np.searchsorted(targets, begin), np.searchsorted(targets, end), together)
    n_targets = with_target.end - with_target.begin
    return every, every if batch.targets.rows is None else with_target, n_targets


def example_pass(model: Model, batch: Batch) -> Examples:
    """Runs the model once, forward and backward, on an engine that keeps the factors of every gradient."""
    from onfoot.models.example_engine import example_run

    every, of_head, n_targets = spans_of(batch)
    run, factors = example_run(model, batch.dropout_seed, every, of_head)
    many_small = model.engine.records and every.together > 1  # products by NumPy, the others by kernels
    with one_blas_thread() if many_small else nullcontext():
        loss = unrecorded_loss(run, model.config, batch)
    return Examples(loss, n_targets, factors, compute_threads(model.engine) if many_small else 1)


def compute_threads(engine: Engine) -> int:
    """The number of threads beside the engine's: as many as its kernels run on; 1 if it has none."""
    if not engine.records:
        return 1
    from onfoot.recording.pool import threads  # needs what loads the kernels

    return threads()


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
