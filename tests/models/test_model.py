"""`Model`: initial values, dtypes, traces, segments."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import onfoot
from onfoot.arrays import to_numpy
from onfoot.models.model import Model
from oracles import assert_close, scrambled

CONFIG = onfoot.GPT2Config(vocab_size=11, n_positions=8, n_embd=6, n_layer=2, n_head=2)
TOKENS = np.array([[1, 2, 3, 2], [7, 0, 10, 10]])


def test_the_same_seed_gives_the_same_model() -> None:
    one, same, other = (onfoot.create(CONFIG, seed=s) for s in (1, 1, 2))
    assert all((one.params[k] == same.params[k]).all() for k in one.params)
    assert any((one.params[k] != other.params[k]).any() for k in one.params)


def test_initial_values_are_gpt2s() -> None:
    config = onfoot.GPT2Config(vocab_size=500, n_positions=300, n_embd=128, n_layer=8, n_head=2)
    params = onfoot.create(config).params
    assert params["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert params["transformer.h.3.attn.c_attn.weight"].std() == pytest.approx(0.02, rel=0.02)
    for residual in ("attn.c_proj", "mlp.c_proj"):  # narrower by √(2 n_layer) = 4
        assert params[f"transformer.h.3.{residual}.weight"].std() == pytest.approx(0.005, rel=0.02)
    assert (params["transformer.h.0.ln_1.weight"] == 1).all() and (params["transformer.h.0.mlp.c_fc.bias"] == 0).all()


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_logits_and_gradients_have_the_models_dtype(engine: str, dtype: str) -> None:
    model = onfoot.create(CONFIG, dtype=dtype, engine=engine)
    _, grads = model.loss_and_grads(TOKENS)
    assert to_numpy(model.logits(TOKENS)).dtype == dtype
    for name, value in model.params.items():
        assert to_numpy(value).dtype == dtype
        assert to_numpy(grads[name]).dtype == dtype and grads[name].shape == value.shape


def test_float32_gradients_are_within_rounding_of_float64() -> None:
    params = scrambled(onfoot.create(CONFIG).params, 0)
    _, exact = Model(CONFIG, params, "float64").loss_and_grads(TOKENS)
    _, rounded = Model(CONFIG, params, "float32").loss_and_grads(TOKENS)
    for name in exact:
        assert_close(rounded[name], exact[name], 5e-6, name)


def test_no_targets_means_each_tokens_successor() -> None:
    model = onfoot.create(CONFIG, dtype="float64")
    targets = np.concatenate([TOKENS[:, 1:], np.full((2, 1), -100)], axis=1)
    assert model.loss(TOKENS) == model.loss(TOKENS, targets)


def test_an_untrained_model_is_as_good_as_guessing() -> None:
    model = onfoot.create(onfoot.GPT2Config(vocab_size=97, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    assert model.loss(np.arange(8)[None]) == pytest.approx(np.log(97), rel=0.02)


def test_a_trace_holds_every_step_of_table_2_and_the_same_gradients() -> None:
    model = Model(CONFIG, scrambled(onfoot.create(CONFIG).params, 0), "float64")
    trace = model.trace(TOKENS, input_gradient=True)
    loss, grads = model.loss_and_grads(TOKENS)
    assert trace.loss == loss
    assert all((trace.grads[k] == grads[k]).all() for k in grads)
    names = {(name, block) for name, block, _ in trace.items()}
    for b in range(CONFIG.n_layer):
        assert {(f"a_{i}", b) for i in range(1, 11)} | {(f"Δ_{i}", b) for i in range(1, 11)} <= names
        assert {("ρ", b), ("Δ_causal", b), ("q", b), ("k", b), ("v", b)} <= names
    assert {(n, None) for n in ("a_0", "a_11", "a_12", "y_pred", "Δ_12", "Δ_11", "Δ_0")} <= names
    assert (trace["a_12"] == model.logits(TOKENS)).all()
    assert (trace["Δ_10", 0] == trace["Δ_1", 1]).all()  # one block's output is the next one's input
    assert_close(trace["y_pred"].sum(-1), np.ones(TOKENS.shape), 1e-14)
    with pytest.raises(KeyError, match="Δ_13"):
        trace["Δ_13"]


def test_the_trace_without_input_gradient_has_no_delta_0() -> None:
    assert 0 not in onfoot.create(CONFIG).trace(TOKENS).delta


def test_a_model_can_be_copied() -> None:
    model = onfoot.create(CONFIG)
    twin = copy.deepcopy(model)
    twin.params["transformer.ln_f.bias"][0] = 5
    assert model.params["transformer.ln_f.bias"][0] == 0
    assert (twin.logits(TOKENS) != model.logits(TOKENS)).any()
