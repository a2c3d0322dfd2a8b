"""The What if view: what a gradient promises for a change, beside what the change does to the loss.

The promise is the gradient times the change. The truth is a forward pass with the changed value put in: a weight in
the model's parameters, an activation as soon as it is computed, a score before softmax.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onfoot.engine import Engine
from onfoot.explore.factors import entry_of
from onfoot.explore.jobs import tracked
from onfoot.explore.proof import ScoresProbe
from onfoot.explore.study_context import StudyContext
from onfoot.explore.wide import with_moved
from onfoot.quantized import Quantized

SIZES = (0.001, 0.01, 0.1, 1.0, 10.0)  # the table's multiples of the chosen change
POINTS, LARGE_POINTS = 12, 3  # of the curve, on each side of 0; the second of a large model
MAX_CHANGE = 1e6

LossAfter = Callable[[float], float]  # change -> loss


class Intervention(ScoresProbe):
    """The loss of the text with something in the network changed."""

    def __init__(self, m: StudyContext) -> None:
        super().__init__(m.model, m.tokens, m.targets, m.divisor, 0)

    def with_weight(self, name: str, at: tuple[int, ...], change: float) -> float:
        changed, weight = copy.copy(self.model), self.model.params[name]
        if isinstance(weight, Quantized):
            row, column = (np.array([index]) for index in at)
            weight = with_moved(weight, (row, column), np.array([change]))
        else:
            weight = weight.copy()
            weight[at] += change
        changed.params = {**self.model.params, name: weight}  # the study's model keeps its own
        return changed.loss(self.tokens, self.targets, divisor=self.divisor)

    def with_activation(self, noted: str, at: tuple[int, int], change: float) -> float:
        def move(value: np.ndarray) -> None:
            value[0][at] += change  # (1, T, C)

        return self.with_moves({noted: move})

    def with_score(self, block: int, head: int, at: tuple[int, int], change: float) -> float:
        by = np.zeros((self.tokens.shape[1],) * 2)  # (T, T)
        by[at] = change
        return self._loss(self._perturbed_scores(block, head, by), None)

    def with_moves(self, moves: Mapping[str, Callable[[np.ndarray], None]]) -> float:
        """The loss when each named activation is changed in place as soon as it is computed."""

        def note(name: str, value: np.ndarray) -> None:
            if name in moves:
                moves[name](value)

        return self._loss(self.model.engine, note)

    def without_scale(self, block: int) -> float:
        """The loss when one block's scores are not divided by √d."""
        return self._loss(self._unscaled(block), None)

    def _unscaled(self, block: int) -> Engine:
        engine, calls = self.model.engine, iter(range(self.model.config.n_layer))

        def forward_of(name: str) -> Callable[..., Any]:
            def forward(q: Any, *rest: Any) -> Any:
                scale = math.sqrt(q.shape[-1]) if next(calls) == block else 1.0
                return engine.table[name](q * scale, *rest)

            return forward

        names = [name for name in ("attention_forward", "grouped_query_forward") if engine.has(name)]
        return Engine(engine.name, {**engine.table, **{name: forward_of(name) for name in names}}, np.asarray)


def choices(m: StudyContext) -> dict[str, Any]:
    """Everything that can be changed: weights, activations and scores, each with its name and shape."""
    weights = [{"name": name, "shape": list(m.params[name].shape)} for name in m.params]
    points = [{"name": id, "shape": list(m.tensors[id].shape)} for id in activations(m)]
    n = m.tokens.shape[1]
    heads = [{"name": f"{b}.{h}", "shape": [n, n]} for b in range(m.config.n_layer) for h in range(m.config.n_head)]
    return {"weight": weights, "activation": points, "score": heads}


def activations(m: StudyContext) -> dict[str, tuple[str, str]]:
    """Activation id -> (the name that the forward pass reports it by, the id of its error signal)."""
    found = {"a_1": ("0.a_1", "Δ_1")}
    for b in range(m.config.n_layer):
        found |= {f"{b}.a_{i}": (f"{b}.a_{i}", f"{b}.Δ_{i}") for i in (2, 3, 4, 5, 6, 7, "g", "u", 8, 9, 10)}
    found |= {f"a_{i}": (f"a_{i}", f"Δ_{i}") for i in (11, 12)}
    return {id: pair for id, pair in found.items() if id in m.tensors and pair[1] in m.tensors}


def change_of(m: StudyContext, kind: str, name: str, row: int, column: int) -> tuple[float, float, LossAfter]:
    """The value of a cell, the gradient there, and the loss as a function of a change of it."""
    here = Intervention(m)
    if kind == "weight":
        if name not in m.grads:
            raise KeyError(f"unknown parameter {name!r}")
        at = _cell(m.params[name], row, column)
        return m.entry(name, at), entry_of(m.grads, name, at), lambda change: here.with_weight(name, at, change)
    if kind == "activation":
        if name not in activations(m):
            raise KeyError(f"unknown activation {name!r}")
        noted, delta = activations(m)[name]
        at = _cell(m.tensors.value(name), row, column)
        value, gradient = m.tensors.value(name)[at], m.tensors.value(delta)[at]
        shown = m.tensors[name].columns  # of a large vocabulary, the array has only some columns
        moved = (row, column if shown is None else int(shown[column]))
        return float(value), float(gradient), lambda change: here.with_activation(noted, moved, change)
    if kind == "score":
        block, head = _head(m, name)
        gradient = m.trace.blocks[block].delta_causal[0, head]  # (T, T)
        at = _cell(gradient, row, column)
        if m.config.causal and column > row:
            raise ValueError(f"token {row} cannot attend to token {column}: it comes later, so the score is masked")
        score = scaled_scores(m, block)[head][at]
        return float(score), float(gradient[at]), lambda change: here.with_score(block, head, (row, column), change)
    raise ValueError(f"kind must be weight, activation or score, got {kind!r}")


def scaled_scores(m: StudyContext, block: int) -> np.ndarray:
    """The scores q kᵗ / √d of all heads of a block before the mask, (H, T, T)."""
    traced = m.trace.blocks[block]
    q, k = traced.q[0], traced.k[0]
    k = np.repeat(k, len(q) // len(k), axis=0)  # grouped queries share keys
    return q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])


def _head(m: StudyContext, name: str) -> tuple[int, int]:
    known = {f"{b}.{h}": (b, h) for b in range(m.config.n_layer) for h in range(m.config.n_head)}
    if name not in known:
        raise KeyError(f"unknown head {name!r}")
    return known[name]


def _cell(array: np.ndarray, row: int, column: int) -> tuple[int, ...]:
    """The index of a cell; a vector has only columns."""
    rows, columns = array.shape if array.ndim == 2 else (1, array.shape[0])
    for what, index, size in (("row", row, rows), ("column", column, columns)):
        if not 0 <= index < size:
            raise ValueError(f"{what} must be between 0 and {size - 1}, got {index}")
    return (row, column) if array.ndim == 2 else (column,)


def what_if(m: StudyContext, kind: str, name: str, row: int, column: int, change: float) -> dict[str, Any]:
    """The promised and the true change of the loss, for several sizes of the change and along a curve."""
    if not 0 < abs(change) <= MAX_CHANGE:
        raise ValueError(f"the change must not be 0 and at most {MAX_CHANGE:g} in size, got {change:g}")
    value, gradient, loss_after = change_of(m, kind, name, row, column)

    points = LARGE_POINTS if m.frozen else POINTS
    sizes, curve = [change * size for size in SIZES], [change * i / points for i in range(-points, points + 1)]
    true: dict[float, float | None] = {0.0: 0.0}  # the network as it is
    for by in tracked([by for by in dict.fromkeys([*sizes, *curve]) if by], "changes of the value"):
        with np.errstate(all="ignore"):
            loss = loss_after(by)
        true[by] = loss - m.trace.loss if math.isfinite(loss) else None

    def effect(by: float) -> dict[str, Any]:
        return {"change": by, "promised": gradient * by, "true": true[by]}

    return {
        "kind": kind,
        "name": name,
        "row": row,
        "column": column,
        "value": value,
        "gradient": gradient,
        "sizes": [effect(by) for by in sizes],
        "curve": [effect(by) for by in curve],
    }
