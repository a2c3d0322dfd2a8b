"""The invariants that --watch measures: at rounding level if the formulas are right, and not if they are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

import onfoot
from onfoot.engine import OPS, Engine
from onfoot.models.model import Model
from onfoot.train.invariants import invariants
from oracles import scrambled

CONFIG = onfoot.GPT2Config(vocab_size=11, n_positions=8, n_embd=6, n_layer=2, n_head=2)
TOKENS = np.array([[1, 2, 3, 2, 5], [7, 0, 10, 10, 4]])
TARGETS = np.array([[2, 3, 2, 5, -100], [0, 10, 10, 4, -100]])


def measured(**wrong: Any) -> dict[str, float]:
    engine = Engine("numpy", {**OPS, **wrong}, np.asarray)
    return invariants(Model(CONFIG, scrambled(onfoot.create(CONFIG).params, 0), "float64", engine), TOKENS, TARGETS)


def test_right_formulas_keep_every_invariant() -> None:
    assert max(measured().values()) < 1e-12


def test_wrong_keys_gradients_break_the_invariant_of_their_biases() -> None:
    def attention_backward(dy: Any, saved: Any) -> Any:
        dq, dk, dv = OPS["attention_backward"](dy, saved)
        return dq, dk + 0.01, dv

    assert measured(attention_backward=attention_backward)["gradient_of_b_k"] > 1e-2


def test_a_wrong_layer_norm_breaks_the_invariant_of_its_features() -> None:
    def layer_norm_backward(dy: Any, saved: Any) -> Any:
        dx, *rest = OPS["layer_norm_backward"](dy, saved)
        return dx + 0.01 * dy, *rest

    assert measured(layer_norm_backward=layer_norm_backward)["features_of_layer_norm"] > 1e-4
