"""The whole network: every gradient against autograd and finite differences, on random configurations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import onfoot
from onfoot.engine import OPS, Engine
from onfoot.models.model import Model
from oracles import assert_close, directional_difference, gpt2_loss_and_grads, scrambled

KEY_BIAS = "attn.c_attn.bias"


@st.composite
def configurations(draw: Any) -> onfoot.GPT2Config:
    tied = draw(st.booleans())
    n_head = draw(st.integers(1, 4))
    free_heads = draw(st.booleans())
    return onfoot.GPT2Config(
        vocab_size=draw(st.integers(2, 23)),
        n_positions=draw(st.integers(7, 11)),
        n_embd=draw(st.integers(2, 13)) if free_heads else n_head * draw(st.integers(2, 5)),
        n_layer=draw(st.integers(1, 3)),
        n_head=n_head,
        n_inner=draw(st.none() | st.integers(1, 17)),
        head_dim=draw(st.integers(1, 6)) if free_heads else None,
        qk_head_dim=draw(st.none() | st.integers(1, 6)),
        activation_function=draw(st.sampled_from(["gelu_new", "gelu", "relu"])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-2])),
        tie_word_embeddings=tied,
        lm_head_bias=False if tied else draw(st.booleans()),
        causal=draw(st.booleans()),
    )


# What all but vanishes is the rounding of what it was summed from; a norm whose features hardly differ enlarges that
# by up to 1/√eps: one token that attends to itself alone, features of width 2.
ROUNDING = float(np.finfo(np.float64).eps) / np.sqrt(1e-5)


def batch(config: onfoot.GPT2Config, b: int, t: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets, some of them −100."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (b, t))
    targets = rng.integers(0, config.vocab_size, (b, t))
    targets[rng.random((b, t)) < 0.3] = -100
    targets[0, 0] = 0
    return tokens, targets


def model_away_from_start(config: onfoot.GPT2Config, seed: int, engine: str | Engine = "numpy") -> Model:
    params = scrambled(onfoot.create(config, dtype="float64").params, seed)
    return Model(config, params, dtype="float64", engine=engine)


def key_biases(config: onfoot.GPT2Config) -> slice:
    width = config.n_head * config.key_width
    return slice(width, 2 * width)


@settings(max_examples=60)
@given(configurations(), st.integers(1, 3), st.integers(1, 7), st.integers(0, 10**6))
@example(onfoot.GPT2Config(11, 9, 12, 2, 3, qk_head_dim=5, head_dim=7), 2, 7, 0)
@example(onfoot.GPT2Config(11, 9, 12, 2, 3, tie_word_embeddings=False, lm_head_bias=True), 1, 1, 1)
def test_every_gradient_equals_autograd(config: onfoot.GPT2Config, b: int, t: int, seed: int) -> None:
    model = model_away_from_start(config, seed)
    tokens, targets = batch(config, b, t, seed)
    loss, grads = model.loss_and_grads(tokens, targets)
    expected_loss, expected = gpt2_loss_and_grads(model.params, config, tokens, targets)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert set(grads) == set(expected)
    norm = np.sqrt(sum(float((g**2).sum()) for g in expected.values()))
    of_keys = [name for name in expected if name.endswith(KEY_BIAS)]
    assert len(of_keys) == config.n_layer
    for name in of_keys:
        assert (grads[name][key_biases(config)] == 0).all()  # exactly; autograd has noise there
        assert np.abs(expected[name][key_biases(config)]).max() <= 1e-12 * max(norm, 1)
        expected[name][key_biases(config)] = 0
    for name in expected:
        error = np.linalg.norm(grads[name] - expected[name])
        assert error <= 1e-10 * np.linalg.norm(expected[name]) + ROUNDING * norm, name


@settings(max_examples=30)
@given(configurations(), st.integers(1, 3), st.integers(1, 7), st.integers(0, 10**6))
def test_gradients_agree_with_a_finite_difference(config: onfoot.GPT2Config, b: int, t: int, seed: int) -> None:
    if config.activation_function == "relu":
        config = onfoot.GPT2Config.from_dict({**config.to_dict(), "activation_function": "gelu"})  # no kinks
    model = model_away_from_start(config, seed)
    tokens, targets = batch(config, b, t, seed)
    _, grads = model.loss_and_grads(tokens, targets)
    rng = np.random.default_rng(seed + 1)
    names = list(model.params)
    start = [model.params[n].copy() for n in names]
    directions = [rng.normal(size=p.shape) for p in start]

    def loss(*values: np.ndarray) -> Any:
        model.params.update(zip(names, values, strict=True))
        return model.loss(tokens, targets)

    slope = directional_difference(loss, start, directions, 1.0, 1e-5)
    by_hand = sum(float((grads[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    scale = np.sqrt(
        sum(float((grads[n] ** 2).sum()) * float((d**2).sum()) for n, d in zip(names, directions, strict=True))
    )
    assert abs(slope - by_hand) <= 1e-6 * max(scale, 1e-3)


@settings(max_examples=30)
@given(configurations(), st.integers(1, 3), st.integers(1, 7), st.integers(0, 10**6))
def test_numpy_and_torch_engines_agree(config: onfoot.GPT2Config, b: int, t: int, seed: int) -> None:
    tokens, targets = batch(config, b, t, seed)
    loss, grads = model_away_from_start(config, seed, "numpy").loss_and_grads(tokens, targets)
    loss_torch, grads_torch = model_away_from_start(config, seed, "torch").loss_and_grads(tokens, targets)
    assert loss == pytest.approx(loss_torch, rel=1e-12)
    norm = np.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    for name in grads:
        difference = np.linalg.norm(grads[name] - grads_torch[name].numpy())
        assert difference <= 1e-12 * np.linalg.norm(grads[name]) + ROUNDING * norm, name


@pytest.mark.parametrize(
    "pair",
    ["linear", "embedding", "layer_norm", "gelu_tanh", "attention", "cross_entropy"],
)
def test_a_bug_planted_in_one_pair_shows_in_the_networks_gradients(pair: str) -> None:
    config = onfoot.GPT2Config(vocab_size=7, n_positions=6, n_embd=6, n_layer=2, n_head=2)

    def slightly_wrong(dy: Any, saved: Any) -> Any:
        out = OPS[f"{pair}_backward"](dy, saved)
        return (out[0] * 1.001, *out[1:]) if isinstance(out, tuple) else out * 1.001

    model = model_away_from_start(config, 0, Engine("numpy", {**OPS, f"{pair}_backward": slightly_wrong}, np.asarray))
    tokens, targets = batch(config, 2, 5, 0)
    _, grads = model.loss_and_grads(tokens, targets)
    _, expected = gpt2_loss_and_grads(model.params, config, tokens, targets)
    with pytest.raises(AssertionError):
        for name in grads:
            if not name.endswith(KEY_BIAS):
                assert_close(grads[name], expected[name], 1e-10, name)


def test_frozen_parameters_get_no_gradient_and_change_no_other() -> None:
    config = onfoot.GPT2Config(vocab_size=7, n_positions=6, n_embd=6, n_layer=2, n_head=2)
    tokens, targets = batch(config, 2, 5, 0)
    model = model_away_from_start(config, 0)
    _, everything = model.loss_and_grads(tokens, targets)
    for trainable in (
        {"transformer.h.1.mlp.c_fc.weight"},
        {"transformer.ln_f.bias"},
        {"transformer.wpe.weight"},
        {"transformer.h.0.attn.c_attn.weight", "transformer.h.1.ln_2.weight"},
    ):
        model.trainable = trainable
        _, grads = model.loss_and_grads(tokens, targets)
        assert set(grads) == trainable
        for name in trainable:
            assert (grads[name] == everything[name]).all()


def test_dropout_gradients_are_those_of_the_very_pattern_that_was_drawn() -> None:
    config = onfoot.GPT2Config(
        vocab_size=7, n_positions=6, n_embd=6, n_layer=2, n_head=2, embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.4
    )
    tokens, targets = batch(config, 2, 5, 0)
    model = model_away_from_start(config, 3)
    loss, grads = model.loss_and_grads(tokens, targets, dropout_seed=5)
    again, _ = model.loss_and_grads(tokens, targets, dropout_seed=5)
    other, _ = model.loss_and_grads(tokens, targets, dropout_seed=6)
    assert loss == again != other
    assert model.loss_and_grads(tokens, targets)[0] == model.loss(tokens, targets)
    name = "transformer.h.0.mlp.c_fc.weight"
    start = model.params[name]
    direction = np.random.default_rng(1).normal(size=start.shape)

    def value(p: np.ndarray) -> Any:
        model.params[name] = p
        return model.loss_and_grads(tokens, targets, dropout_seed=5)[0]

    slope = directional_difference(value, [start], [direction], 1.0, 1e-4)
    assert slope == pytest.approx(float((grads[name] * direction).sum()), rel=1e-8)
