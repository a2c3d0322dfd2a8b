"""Mathematical invariants of the gradients, measured on a model during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.config import GPT2Config

if TYPE_CHECKING:
    from onfoot.models.model import Model


def invariants(model: Model, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Sums that must be 0, relative to the summed magnitudes: about 1e-6 is float32 rounding, about 1 is a bug.

    - rows of Δ_causal sum to 0 (eq. 26)
    - the key bias has gradient 0 (eq. 29): the sum of the backward pass's dk over the tokens
    - the input gradient of a layer norm sums to 0 over the features (eq. 40)

    LLaMA has RMS norms, and RoPE makes its key bias count: only the first holds for it.
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
    if not isinstance(model.config, GPT2Config):
        return {"rows_of_delta_causal": rows}
    return {"rows_of_delta_causal": rows, "gradient_of_b_k": keys, "features_of_layer_norm": norms}


def _share(total: np.ndarray, size: np.ndarray) -> float:
    return float(np.abs(total).max() / max(float(size.max()), 1e-30))
