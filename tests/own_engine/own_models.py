"""Small networks, a batch, and the plain pairs with some of them replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import plain_pairs

import onfoot

GPT2 = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=12, vocab_size=17)
LLAMA = onfoot.LlamaConfig(
    vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=12,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 17, (3, 12))
Pairs = dict[str, Callable[..., Any]]


def plain(**changes: Any) -> Pairs:
    """The functions of the module, some replaced."""
    return {name: f for name, f in vars(plain_pairs).items() if name.endswith("ward")} | changes


def moved(model: onfoot.Model, seed: int = 1) -> onfoot.Model:
    """The model with weights away from their initial values."""
    rng = np.random.default_rng(seed)
    for p in model.params.values():
        p += 0.1 * rng.standard_normal(p.shape).astype(p.dtype)
    return model
