"""Proofs: checks a gradient against a finite difference of the loss, and against autograd if PyTorch is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.engine import Engine
from onfoot.probe import Check, Probe, of_query_heads

if TYPE_CHECKING:
    from onfoot.explore.autograd import Autograd
    from onfoot.explore.tensors import Tensor

TOLERANCE = 1e-9  # of the formula against autograd, both in float64
SMALLEST = 1e-6  # of the global gradient norm: the denominator for smaller gradients, which may be 0


def measured(tensor: Tensor, probe: ScoresProbe) -> dict[str, Any]:
    """Compares a gradient with a finite difference of the loss along a random direction."""
    if tensor.measure is None:
        raise ValueError(f"{tensor.id} is not a gradient, so there is nothing to check")
    check = tensor.measure(probe)
    found = {"formula": check.formula, "difference": check.difference, "error": check.error, "passed": check.passed}
    return {name: bool(value) if name == "passed" else float(value) for name, value in found.items()}


def differentiated(tensor: Tensor, autograd: Autograd, norm: float) -> dict[str, Any]:
    """Compares a gradient with autograd's; `norm` is the global gradient norm."""
    if tensor.differentiate is None:
        raise ValueError(f"{tensor.id} is not a gradient, so there is nothing to check")
    error = relative_error(tensor.value, tensor.differentiate(autograd), SMALLEST * norm)
    return {"error": error, "passed": error <= TOLERANCE}


def relative_error(value: np.ndarray, reference: np.ndarray, smallest: float) -> float:
    """‖value − reference‖ / max(‖reference‖, smallest)."""
    return float(np.linalg.norm(value - reference) / max(np.linalg.norm(reference), smallest, 1e-300))


class ScoresProbe(Probe):
    """A probe that can also perturb the attention weights after softmax."""

    sampled = 0  # the number of entries that the last check moved, if not all

    def weights(self, gradient: np.ndarray, block: int, head: int) -> Check:
        """Checks a gradient (T, T) by perturbing ρ of one head."""

        def loss(direction: np.ndarray, eps: float) -> float:
            return self._loss(self._perturbed_weights(block, head, eps * direction), None)

        return self._check(gradient, loss)

    def _perturbed_weights(self, block: int, head: int, by: np.ndarray) -> Engine:
        engine = self.model.engine

        def moved(q: Any, k: Any, v: Any, causal: bool, start: Any) -> Any:
            y, _ = engine.attention_forward(q, of_query_heads(k, q), of_query_heads(v, q), causal, start, None)
            y[:, head] += by @ of_query_heads(v, q)[:, head]  # the output is linear in ρ
            return y

        return self._with_attention(block, moved)
