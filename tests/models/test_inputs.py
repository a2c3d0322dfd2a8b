"""What a model refuses: every error names the value, the limit and the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.models.model import Model

CONFIG = onfoot.GPT2Config(vocab_size=11, n_positions=8, n_embd=6, n_layer=1, n_head=2)
TOKENS = np.array([[1, 2, 3]])


@pytest.fixture(scope="module")
def model() -> Model:
    return onfoot.create(CONFIG)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[1.0, 2.0]]), "dtype float64; integers are needed"),
        (np.array([[True, False]]), "dtype bool; integers are needed"),
        (np.array([[1, 11]]), r"token id 11 is outside 0 ... 10 \(vocab_size=11\)"),
        (np.array([[-1, 2]]), "token id -1 is outside"),
        (np.zeros((1, 9), int), "sequence of 9 tokens exceeds n_positions=8; shorten it"),
        (np.zeros((0, 3), int), "empty batch"),
        (np.zeros((2, 0), int), "empty batch"),
        (np.array([1, 2]), r"shape \(2,\); \(batch, tokens\) is needed"),
    ],
)
def test_bad_tokens_are_refused(model: Model, tokens: np.ndarray, message: str) -> None:
    for ask in (model.logits, model.loss, model.loss_and_grads, model.trace):
        with pytest.raises(ValueError, match=message):
            ask(tokens)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.array([[1, 2]]), r"targets have shape \(1, 2\), tokens \(1, 3\)"),
        (np.array([[1, 2, 11]]), "target id 11 is outside"),
        (np.array([[1, 2, -1]]), "target id -1 is outside"),
        (np.array([[1.0, 2, 3]]), "targets have dtype float64"),
        (np.full((1, 3), -100), "no target counts: all 3 are -100"),
    ],
)
def test_bad_targets_are_refused(model: Model, targets: np.ndarray, message: str) -> None:
    for ask in (model.loss, model.loss_and_grads, model.trace):
        with pytest.raises(ValueError, match=message):
            ask(TOKENS, targets)


def test_one_token_without_targets_has_no_loss(model: Model) -> None:
    with pytest.raises(ValueError, match="no target counts"):
        model.loss(np.array([[4]]))


@pytest.mark.parametrize(
    ("segments", "message"),
    [(np.zeros((1, 2), int), "segments have shape"), (np.array([[0, 2, 1]]), "must be integers that do not fall")],
)
def test_bad_segments_are_refused(model: Model, segments: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.loss(TOKENS, segments=segments)


def test_a_bad_divisor_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="divisor=0 must be above 0"):
        model.loss(TOKENS, divisor=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 7}, "n_embd=7 is not divisible by n_head=2; .* head_dim"),
        ({"activation_function": "swish"}, "unknown activation_function 'swish'; known are gelu_new, gelu, relu"),
        ({"n_layer": 0}, "n_layer=0: a whole number of at least 1"),
        ({"vocab_size": 2.5}, "vocab_size=2.5: a whole number"),
        ({"n_head": True}, "n_head=True: a whole number"),
        ({"resid_pdrop": 1.0}, r"resid_pdrop=1.0 is not in \[0, 1\)"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon=0.0 must be above 0"),
        ({"lm_head_bias": True}, "lm_head_bias=True needs tie_word_embeddings=False"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onfoot.GPT2Config(**{"vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 1, "n_head": 2, **changes})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine 'cuda'; known are auto, numpy, torch"):
        onfoot.create(CONFIG, engine="cuda")
    with pytest.raises(ValueError, match="unknown dtype 'float16'; known are float32, float64"):
        onfoot.create(CONFIG, dtype="float16")
    with pytest.raises(ValueError, match="unknown preset 'gpt3'; known are gpt2,"):
        onfoot.preset("gpt3")
    with pytest.raises(ValueError, match="a GPT2Config is needed, not dict"):
        onfoot.create({"n_layer": 2})  # type: ignore[arg-type]


def test_parameters_must_fit_the_configuration(model: Model) -> None:
    name = "transformer.ln_f.bias"
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        Model(CONFIG, {k: v for k, v in model.params.items() if k != name})
    with pytest.raises(ValueError, match=rf"{name} has shape \(5,\); the configuration asks for \(6,\)"):
        Model(CONFIG, {**model.params, name: np.zeros(5)})
    with pytest.raises(ValueError, match="unknown parameter 'extra'"):
        Model(CONFIG, {**model.params, "extra": np.zeros(5)})
