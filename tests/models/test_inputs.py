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
        (np.array([[1.0, 2.0]]), "tokens must be integers .*, got dtype float64"),
        (np.array([[True, False]]), "tokens must be integers .*, got dtype bool"),
        (np.array([[1, 11]]), r"token id 11 is outside 0 ... 10 \(vocab_size=11\)"),
        (np.array([[-1, 2]]), "token id -1 is outside"),
        (np.zeros((1, 9), int), "sequence of 9 tokens exceeds n_positions=8; shorten it"),
        (np.zeros((0, 3), int), "empty batch"),
        (np.zeros((2, 0), int), "empty batch"),
        (np.array([1, 2]), r"tokens must have shape \(batch, tokens\), got \(2,\)"),
    ],
)
def test_bad_tokens_are_refused(model: Model, tokens: np.ndarray, message: str) -> None:
    for ask in (model.logits, model.loss, model.loss_and_grads, model.trace):
        with pytest.raises(ValueError, match=message):
            ask(tokens)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.array([[1, 2]]), r"targets have shape \(1, 2\), but tokens have shape \(1, 3\)"),
        (np.array([[1, 2, 11]]), "target id 11 is outside"),
        (np.array([[1, 2, -1]]), "target id -1 is outside"),
        (np.array([[1.0, 2, 3]]), "targets must be integers .*, got dtype float64"),
        (np.full((1, 3), -100), "all 3 targets are -100"),
    ],
)
def test_bad_targets_are_refused(model: Model, targets: np.ndarray, message: str) -> None:
    for ask in (model.loss, model.loss_and_grads, model.trace):
        with pytest.raises(ValueError, match=message):
            ask(TOKENS, targets)


def test_one_token_without_targets_has_no_loss(model: Model) -> None:
    with pytest.raises(ValueError, match="at least one must be a token id"):
        model.loss(np.array([[4]]))


@pytest.mark.parametrize(
    ("segments", "message"),
    [(np.zeros((1, 2), int), "segments have shape"), (np.array([[0, 2, 1]]), "must be integers that never decrease")],
)
def test_bad_segments_are_refused(model: Model, segments: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.loss(TOKENS, segments=segments)


def test_a_bad_divisor_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"divisor must be > 0 .*, got 0"):
        model.loss(TOKENS, divisor=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": 7}, "n_embd=7 is not divisible by n_head=2; .* head_dim"),
        ({"activation_function": "swish"}, "unknown activation_function 'swish'; choose from gelu_new, gelu, relu"),
        ({"n_layer": 0}, "n_layer must be an integer >= 1, got 0"),
        ({"vocab_size": 2.5}, "vocab_size must be an integer >= 1, got 2.5"),
        ({"n_head": True}, "n_head must be an integer >= 1, got True"),
        ({"resid_pdrop": 1.0}, r"resid_pdrop must be in \[0, 1\), got 1.0"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon must be > 0, got 0.0"),
        ({"lm_head_bias": True}, "lm_head_bias=True requires tie_word_embeddings=False"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onfoot.GPT2Config(**{"vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_layer": 1, "n_head": 2, **changes})


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine 'cuda'; choose from auto, numpy, torch"):
        onfoot.create(CONFIG, engine="cuda")
    with pytest.raises(ValueError, match="unknown dtype 'float16'; choose from float32, float64"):
        onfoot.create(CONFIG, dtype="float16")
    with pytest.raises(ValueError, match="unknown preset 'gpt3'; choose from gpt2,"):
        onfoot.preset("gpt3")
    with pytest.raises(ValueError, match="config must be a GPT2Config or a LlamaConfig, got dict"):
        onfoot.create({"n_layer": 2})  # type: ignore[arg-type]


def test_parameters_must_fit_the_configuration(model: Model) -> None:
    name = "transformer.ln_f.bias"
    with pytest.raises(ValueError, match=f"missing parameter '{name}'"):
        Model(CONFIG, {k: v for k, v in model.params.items() if k != name})
    with pytest.raises(ValueError, match=rf"{name} has shape \(5,\); the configuration expects \(6,\)"):
        Model(CONFIG, {**model.params, name: np.zeros(5)})
    with pytest.raises(ValueError, match="unexpected parameter 'extra'"):
        Model(CONFIG, {**model.params, "extra": np.zeros(5)})
