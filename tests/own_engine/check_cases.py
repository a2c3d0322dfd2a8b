"""Small arguments of every pair that a network calls."""

from __future__ import annotations

from typing import Any

import numpy as np


def _x(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


_HEADS = {"q": _x(2, 4, 5, 3), "k": _x(2, 4, 5, 3), "v": _x(2, 4, 5, 2)}
_LORA = {"down": _x(3, 2), "up": _x(2, 4), "scale": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "attention": _HEADS,
    "cross_entropy": {"logits": _x(2, 5, 7), "targets": np.ones((2, 5), np.int64), "divisor": 10.0},
    "dropout": {"x": _x(2, 3), "keep": np.ones((2, 3))},
    "embedding": {"ids": np.array([[1, 0, 1]]), "weight": _x(4, 3)},
    "frozen_linear": {"x": _x(2, 5, 3), "weight": _x(3, 4), "bias": _x(4)},
    "gelu_erf": {"x": _x(2, 3)},
    "gelu_tanh": {"x": _x(2, 3)},
    "grouped_query": {**_HEADS, "k": _x(2, 2, 5, 3), "v": _x(2, 2, 5, 2)},
    "layer_norm": {"x": _x(2, 5, 3), "weight": _x(3), "bias": _x(3)},
    "linear": {"x": _x(2, 5, 3), "weight": _x(3, 4), "bias": _x(4)},
    "lora": {"x": _x(2, 5, 3), **_LORA},
    "lora_linear": {"x": _x(2, 5, 3), "weight": _x(3, 4), "bias": _x(4), **_LORA},
    "relu": {"x": _x(2, 3)},
    "rms_norm": {"x": _x(2, 5, 3), "weight": _x(3)},
    "rope": {"x": _x(2, 5, 4), "cos": _x(5, 2), "sin": _x(5, 2)},
    "swiglu": {"gate": _x(2, 3), "up": _x(2, 3)},
}
