"""Proofs: a gradient by its formula against a finite difference of the loss, and against autograd where it is there."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.engine import Engine
from onfoot.probe import Check, Probe

if TYPE_CHECKING:
    from onfoot.explore.autograd import Autograd
    from onfoot.explore.tensors import Tensor

TOLERANCE = 1e-9  # of the formula against autograd, both in float64
SMALLEST = 1e-6  # of all gradients' norm: gradients with a norm below it are compared with it, for one may be 0


def measured(tensor: Tensor, probe: ScoresProbe) -> dict[str, Any]:
    """A gradient against a finite difference: what it belongs to is moved along a random direction."""
    if tensor.measure is None:
        raise ValueError(f"{tensor.id} is no gradient: there is nothing to prove")
    check = tensor.measure(probe)
    found = {"formula": check.formula, "difference": check.difference, "error": check.error, "passed": check.passed}
    return {name: bool(value) if name == "passed" else float(value) for name, value in found.items()}


def differentiated(tensor: Tensor, autograd: Autograd, norm: float) -> dict[str, Any]:
    """A gradient against autograd's; `norm` is that of all gradients."""
    if tensor.differentiate is None:
        raise ValueError(f"{tensor.id} is no gradient: there is nothing to prove")
    error = relative_error(tensor.value, tensor.differentiate(autograd), SMALLEST * norm)
    return {"error": error, "passed": error <= TOLERANCE}


def relative_error(value: np.ndarray, reference: np.ndarray, smallest: float) -> float:
    """The norm of the difference over the norm of the reference, or over `smallest` where that is larger."""
    return float(np.linalg.norm(value - reference) / max(np.linalg.norm(reference), smallest, 1e-300))


class ScoresProbe(Probe):
    """The probe of the walk, which can move the attention weights behind softmax as well."""

    def weights(self, gradient: np.ndarray, block: int, head: int) -> Check:
        """Checks a gradient (T, T) by moving ρ of one head."""

        def loss(direction: np.ndarray, eps: float) -> float:
            return self._loss(self._moved_weights(block, head, eps * direction), None)

        return self._check(gradient, loss)

    def _moved_weights(self, block: int, head: int, by: np.ndarray) -> Engine:
        engine, calls = self.model.engine, itertools.count()

        def attention_forward(q: Any, k: Any, v: Any, causal: bool, start: Any, keep: Any) -> tuple[Any, Any]:
            y, saved = engine.attention_forward(q, k, v, causal, start, keep)
            if next(calls) == block:
                y[:, head] += by @ v[:, head]  # the output is linear in ρ
            return y, saved

        return Engine(engine.name, {**engine.table, "attention_forward": attention_forward}, np.asarray)
