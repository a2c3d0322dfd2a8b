"""Each dropout layer has its own pattern, each packed example is independent, adapters depend on their seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.models.model import Model
from onfoot.models.params import linear_shapes
from oracles import directional_difference, scrambled

CONFIG = onfoot.GPT2Config(vocab_size=17, n_positions=12, n_embd=12, n_layer=2, n_head=2)
TOKENS = np.random.default_rng(0).integers(0, 17, (2, 9))
PLACES = ("embd_pdrop", "attn_pdrop", "resid_pdrop")


def model(config: onfoot.GPT2Config = CONFIG) -> Model:
    return Model(config, scrambled(onfoot.create(config).params, 0), "float64", "numpy")


def noted(m: Model, seed: int) -> dict[str, np.ndarray]:
    """Every activation of a pass with dropout."""
    from onfoot.models import gpt2

    out: dict[str, np.ndarray] = {}
    run = m.new_run(dropout_seed=seed, on_activation=lambda name, value: out.__setitem__(name, np.array(value)))
    gpt2.features_forward(run, m.config, TOKENS, gpt2.Layout(np.arange(TOKENS.shape[1])))
    return out


@pytest.mark.parametrize("place", PLACES)
def test_each_dropout_acts_at_its_own_place_alone(place: str) -> None:
    found = noted(model(replace(CONFIG, **{place: 0.5})), 1)
    plain = noted(model(), 1)
    embedded = found["a_tok"] + found["a_pos"]
    dropped = {
        "embd_pdrop": bool((found["0.a_1"] == 0).any()),
        "attn_pdrop": not np.allclose(found["0.a_3"], plain["0.a_3"]) and np.allclose(found["0.q"], plain["0.q"]),
        "resid_pdrop": bool((found["0.a_4"] == 0).any()),
    }
    assert [name for name, acts in dropped.items() if acts] == [place]
    assert np.allclose(found["0.a_1"], embedded) == (place != "embd_pdrop")


def test_two_places_of_one_pass_drop_differently_and_one_place_always_alike() -> None:
    run, other = model().new_run(dropout_seed=3), model().new_run(dropout_seed=4)
    one, again, two = (run.dropout_keep(name, (50,), 0.5) for name in ("a", "a", "b"))
    assert (one == again).all() and (one != two).any() and (one != other.dropout_keep("a", (50,), 0.5)).any()
    assert set(np.unique(one)) == {0.0, 2.0}


@pytest.mark.parametrize("place", PLACES)
def test_gradients_under_each_dropout_agree_with_a_difference(place: str) -> None:
    m = model(replace(CONFIG, **{place: 0.4}))
    names = list(m.params)
    values = [m.params[name].copy() for name in names]
    _, grads = m.loss_and_grads(TOKENS, dropout_seed=5)
    rng = np.random.default_rng(1)
    directions = [rng.normal(size=value.shape) for value in values]

    def loss(*moved: np.ndarray) -> np.ndarray:
        m.params.update({name: value.copy() for name, value in zip(names, moved, strict=True)})
        return np.array(m.loss_and_grads(TOKENS, dropout_seed=5)[0])

    expected = directional_difference(loss, values, directions, 1.0, 1e-4)
    found = sum(float((grads[name] * d).sum()) for name, d in zip(names, directions, strict=True))
    assert found == pytest.approx(expected, rel=1e-7)


def test_packed_examples_have_the_loss_and_the_weights_that_they_have_alone() -> None:
    m = model()
    first, second = TOKENS[:1, :4], TOKENS[1:, :5]
    packed = np.concatenate([first, second], axis=1)
    segments = np.array([[0] * 4 + [1] * 5])
    alone = [m.loss(one) * (one.shape[1] - 1) for one in (first, second)]
    assert m.loss(packed, segments=segments) == pytest.approx(sum(alone) / (3 + 4), rel=1e-12)
    trace = m.trace(packed, segments=segments)
    for b in range(2):
        rho = trace["ρ", b][0]
        assert not rho[:, 4:, :4].any() and np.allclose(rho.sum(-1), 1)
        np.testing.assert_allclose(rho[:, 4:, 4:], m.trace(second)["ρ", b][0], atol=1e-12)
        np.testing.assert_allclose(trace["Δ_causal", b][0].sum(-1), 0, atol=1e-14)


def test_a_trace_is_told_down_the_network_and_up_again() -> None:
    told = [(name, b) for name, b, _ in model().trace(TOKENS, input_gradient=True).items()]
    blocks = [(b, name[0]) for name, b in told if b is not None and name[:2] in ("a_", "Δ_")]
    assert list(dict.fromkeys(blocks)) == [(0, "a"), (1, "a"), (1, "Δ"), (0, "Δ")]
    assert told[0] == ("a_0", None) and told[-1] == ("Δ_0", None)
    signals = [name for name, b in told if b == 1 and name.startswith("Δ_")]
    order = ["Δ_10", "Δ_9", "Δ_8", "Δ_7", "Δ_6", "Δ_5", "Δ_4", "Δ_3", "Δ_causal", "Δ_2", "Δ_1"]
    assert signals == order


def test_an_adapter_begins_as_pefts_do_and_from_its_own_seed() -> None:
    def begun(seed: int, n: int = 1) -> list[np.ndarray]:
        m = model(replace(CONFIG, n_embd=48))
        for i in range(n):
            m.add_lora(r=8, targets=["c_fc"], name=f"a{i}", seed=seed)
        return [np.array(m.params[f"transformer.h.0.mlp.c_fc.lora_A.a{i}.weight"]) for i in range(n)]

    (values,) = begun(1)
    bound = 1 / math.sqrt(48)  # torch's kaiming_uniform_ with a = √5
    assert 0.9 * bound < np.abs(values).max() <= bound and values.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert (values == begun(1)[0]).all() and (values != begun(2)[0]).any()
    first, second = begun(1, 2)
    assert (first == values).all() and (first != second).any()


def test_a_rank_is_at_most_the_smaller_side() -> None:
    m = model()
    m.add_lora(r=12, targets=["c_fc"], name="all")  # 12 × 48
    with pytest.raises(ValueError, match=r"r must be in 1 \.\.\. 12 for .* \(12 × 48\), got 13"):
        m.add_lora(r=13, targets=["c_fc"], name="more")


def test_blocks_do_not_train_with_an_adapter_or_without() -> None:
    m = onfoot.create(replace(CONFIG, n_embd=32))
    m.quantize("int8")
    frozen = set(m.quantized)
    assert frozen and not frozen & m.trainable
    m.add_lora(r=2)
    assert m.trainable == set(m.adapters["default"].parameter_names())
    m.use_adapter(None)
    assert not frozen & m.trainable and "transformer.ln_f.weight" in m.trainable


def test_linear_layers_are_in_and_out_in_both_families() -> None:
    llama: Any = onfoot.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    found = linear_shapes(llama)
    assert found["model.layers.0.self_attn.k_proj"] == (32, 16) and found["model.layers.0.mlp.down_proj"] == (48, 32)
    assert found["model.layers.0.mlp.up_proj"] == (32, 48) and found["lm_head"] == (32, 40)
    assert linear_shapes(CONFIG)["transformer.h.0.attn.c_attn"] == (12, 36)
