"""Attribution: how much each token of a text contributes to the loss, from Δ_0, the gradient of the one-hot tokens.

Δ_0 = Δ_1 w_tokᵗ has one column per token of the vocabulary. The entry of the token at that position is gradient ×
input; the difference of two entries is the first-order change of the loss when one token replaces the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.models.inputs import check_tokens, next_token_targets
from onfoot.models.model import Model
from onfoot.terminal import Shown


@dataclass(frozen=True)
class Swap:
    """One token replaced by another; the targets stay those of the original text."""

    position: int
    old: int
    new: int
    predicted: float  # Δ_0[t, new] − Δ_0[t, old], the change of the loss to first order
    actual: float  # the loss with the swap minus the loss without it


@dataclass(frozen=True, repr=False)
class Attribution(Shown):
    """The loss of a text, gradient × input of each token, and the swaps with the lowest predicted loss."""

    loss: float
    tokens: np.ndarray  # (T,)
    contributions: np.ndarray  # (T,)
    swaps: list[Swap]  # lowest predicted change first

    def facts(self) -> dict[str, str]:
        best = self.swaps[0] if self.swaps else None
        swap = "none" if best is None else f"token {best.position} to {best.new}, loss {best.actual:+.4g}"
        return {"loss": f"{self.loss:.6g}", "tokens": str(len(self.tokens)), "best swap": swap}

    def tables(self) -> list[list[list[str]]]:
        rows = [
            [str(t), str(token), f"{share:+.4g}"]
            for t, (token, share) in enumerate(zip(self.tokens.tolist(), self.contributions.tolist(), strict=True))
        ]
        swaps = [
            [str(x) for x in (s.position, s.old, s.new)] + [f"{s.predicted:+.4g}", f"{s.actual:+.4g}"]
            for s in self.swaps
        ]
        return [
            [["position", "token", "gradient × input"], *rows],
            [["position", "old", "new", "predicted", "actual"], *swaps],
        ]


def attribute(model: Model, tokens: Any, targets: Any = None, n_swaps: int = 10) -> Attribution:
    """Attributes the loss of one sequence (T,) to its tokens, and evaluates the `n_swaps` best first-order swaps."""
    if n_swaps < 0:
        raise ValueError(f"n_swaps must be >= 0, got {n_swaps}")
    ids = check_tokens(to_numpy(tokens)[None], model.config.vocab_size, model.config.n_positions)  # (1, T)
    labels = next_token_targets(ids) if targets is None else to_numpy(targets)[None]  # (1, T), the same for every swap
    trace = model.trace(ids, labels, input_gradient=True)
    delta_0 = to_numpy(trace.delta[0])[0]  # (T, V)
    contributions = np.take_along_axis(delta_0, ids[0][:, None], axis=1)  # (T, 1)
    scores = delta_0 - contributions  # (T, V)
    scores[np.arange(ids.shape[1]), ids[0]] = np.inf  # the same token: not a swap
    n = min(n_swaps, scores.size - ids.shape[1])
    swaps = []
    for flat in np.argsort(scores, axis=None, kind="stable")[:n]:
        position, new = (int(i) for i in np.unravel_index(flat, scores.shape))
        swapped = ids.copy()
        swapped[0, position] = new
        actual = model.loss(swapped, labels) - trace.loss
        swaps.append(Swap(position, int(ids[0, position]), new, float(scores[position, new]), actual))
    return Attribution(trace.loss, ids[0], contributions[:, 0], swaps)
