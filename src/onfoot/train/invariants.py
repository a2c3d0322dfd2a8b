"""Invariants that the mathematics promises, measured on a live model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import to_numpy

if TYPE_CHECKING:
    from onfoot.models.model import Model


def invariants(model: Model, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Each as a share of the size of what is summed: rounding in float32 is about 1e-6, a mistake is about 1.

    - rows of Δ_causal sum to 0 (eq. 26)
    - the keys' biases have gradient 0 (eq. 29): the sum of the keys' gradients over the tokens, as the pass made them
    - the features of what a layer norm sends back sum to 0 (eq. 40)
    """
    trace = model.trace(tokens, targets)
    rows, norms, keys = 0.0, 0.0, 0.0
    for block in trace.blocks:
        causal = to_numpy(block.delta_causal)
        rows = max(rows, _share(causal.sum(-1), np.abs(causal).sum(-1)))
        for after, before in ((1, 5), (5, 10)):  # Δ_1 = Δ_5 + LNᵇ(Δ_2), Δ_5 = Δ_10 + LNᵇ(Δ_6)
            skipped = to_numpy(block.delta[before])
            sent = to_numpy(block.delta[after]) - skipped
            norms = max(norms, _share(sent.sum(-1), (np.abs(sent) + np.abs(skipped)).sum(-1)))
        dk = to_numpy(block.dk)  # (B, H, T, d_ρ)
        keys = max(keys, _share(dk.sum(axis=(0, 2)), np.abs(dk).sum(axis=(0, 2))))
    return {"rows_of_delta_causal": rows, "gradient_of_b_k": keys, "features_of_layer_norm": norms}


def _share(total: np.ndarray, size: np.ndarray) -> float:
    return float(np.abs(total).max() / max(float(size.max()), 1e-30))
