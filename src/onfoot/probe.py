"""Finite differences through the complete network: the loss when one array inside it is perturbed.

An activation is perturbed in place when the forward pass reports it to `note`, before anything is computed from it. A
parameter is perturbed in the model's dict. The scores of a head are perturbed by an attention forward that adds to
them before softmax.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onfoot.engine import Engine
from onfoot.models.families import network
from onfoot.models.model import Model
from onfoot.models.step import features
from onfoot.ops.attention import softmax, visible

TOLERANCE = 1e-6
SMALLEST = 1e-4  # smaller derivatives are compared with the absolute tolerance SMALLEST × TOLERANCE

Move = Callable[[np.ndarray], np.ndarray]


def itself(direction: np.ndarray) -> np.ndarray:
    """The default perturbation: the direction unchanged."""
    return direction


class Check(NamedTuple):
    """A directional derivative of the loss, by the gradient's formula and by a finite difference."""

    formula: float
    difference: float

    @property
    def error(self) -> float:
        scale = max(abs(self.formula), abs(self.difference), SMALLEST)
        return abs(self.formula - self.difference) / scale

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # nan does not pass


def derivative(f: Callable[[float], float]) -> float:
    """f'(0) by fourth-order central differences, with the largest step that a ten times smaller one confirms.

    A large step has the least rounding error. If it crosses a kink of ReLU, the two differ and a smaller one is tried.
    """
    coarse = math.nan
    for h in (1e-3, 1e-4, 1e-5, 1e-6):
        fine = (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)
        if abs(fine - coarse) <= 1e-8 * max(abs(fine), 1e-2):
            return coarse
        coarse = fine
    return coarse


class Probe:
    """The loss of one text under a model, as a function of any array inside the network."""

    def __init__(self, model: Model, tokens: np.ndarray, targets: np.ndarray, divisor: float, seed: int) -> None:
        self.model = model
        self.tokens = tokens  # (1, T)
        self.targets = targets  # (1, T)
        self.divisor = divisor
        self.rng = np.random.default_rng(seed)

    def activation(self, gradient: np.ndarray, moves: dict[str, Move]) -> Check:
        """Checks a gradient by perturbing activations, each by its own linear map of one random direction."""

        def loss(direction: np.ndarray, eps: float) -> float:
            def note(noted: str, value: np.ndarray) -> None:
                if noted in moves:
                    value += eps * moves[noted](direction)

            return self._loss(self.model.engine, note)

        return self._check(gradient, loss)

    def scores(self, gradient: np.ndarray, block: int, head: int, move: Move = itself) -> Check:
        """Checks a gradient (T, T) by perturbing the scores of one head before the mask and softmax."""

        def loss(direction: np.ndarray, eps: float) -> float:
            return self._loss(self._perturbed_scores(block, head, eps * move(direction)), None)

        return self._check(gradient, loss)

    def parameter(self, gradient: np.ndarray, name: str, where: Any = ...) -> Check:
        """Checks the gradient of a parameter, or of the part `where` of it, through `model.loss`."""
        params, original = self.model.params, self.model.params[name]

        def loss(direction: np.ndarray, eps: float) -> float:
            params[name] = original.copy()
            params[name][where] += eps * direction
            try:
                return self.model.loss(self.tokens, self.targets, divisor=self.divisor)
            finally:
                params[name] = original

        return self._check(gradient, loss)

    def _check(self, gradient: np.ndarray, loss: Callable[[np.ndarray, float], float]) -> Check:
        direction = self.rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)
        return Check(float((gradient * direction).sum()), derivative(lambda eps: loss(direction, eps)))

    def _loss(self, engine: Engine, note: Any) -> float:
        model = self.model
        run = model.new_run(keep_saved=False, on_activation=note, engine=engine)
        a11 = features(run, model.config, self.tokens)
        a12, _ = network(model.config).head_forward(run, model.config, a11)
        return float(engine.cross_entropy_forward(a12, self.targets, self.divisor)[0])

    def _perturbed_scores(self, block: int, head: int, by: np.ndarray) -> Engine:
        """The model's engine, with an attention that adds `by` (T, T) to the scores of one head of one block."""

        def moved(q: Any, k: Any, v: Any, causal: bool, start: Any) -> Any:
            k, v = of_query_heads(k, q), of_query_heads(v, q)
            scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])  # (1, H, T, T)
            scores[:, head] += by
            return softmax(scores, visible(q.shape[-2], k.shape[-2], causal, start, q)) @ v

        return self._with_attention(block, moved)

    def _with_attention(self, block: int, moved: Callable[..., Any]) -> Engine:
        """The model's engine, with `moved(q, k, v, causal, start)` as the attention of one block."""
        engine, calls = self.model.engine, itertools.count()

        def pair(name: str) -> Callable[..., tuple[Any, Any]]:
            def forward(q: Any, k: Any, v: Any, causal: bool, start: Any, keep: Any) -> tuple[Any, Any]:
                if next(calls) != block:
                    return engine.table[name](q, k, v, causal, start, keep)
                return moved(q, k, v, causal, start), None

            return forward

        pairs = {name: pair(name) for name in ("attention_forward", "grouped_query_forward")}
        return Engine(engine.name, {**engine.table, **pairs}, np.asarray)


def of_query_heads(x: Any, q: Any) -> Any:
    """Keys or values (B, Hkv, T, D) as each query head reads them, (B, H, T, D)."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x[:, [h // group for h in range(q.shape[1])]]
