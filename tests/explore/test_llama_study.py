"""The map of the LLaMA family: its arrays are those of transformers, and its terms add up to them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from llama_oracle import in_float64, in_transformers, scrambled_llama
from onfoot import engine
from onfoot.explore.formulas_llama import all_formulas
from onfoot.explore.study import Study
from onfoot.models.model import Model
from onfoot.ops.rms_norm import rms_norm_backward
from onfoot.ops.rope import rope_forward
from oracles import assert_close

TOKENS = np.array([[3, 1, 4, 1, 5, 9]])
SMALL = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=32, rope_theta=50.0,
)  # fmt: skip
ONE: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied, one key head per head": {**ONE, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "biases": {**ONE, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "qwen2": {**ONE, "model_type": "qwen2"},
    "qwen3": {**ONE, "model_type": "qwen3", "head_dim": 8},
    "mistral, a window of 3": {**ONE, "model_type": "mistral", "sliding_window": 3},
}


@pytest.fixture(scope="module", params=VARIANTS)
def small(request: pytest.FixtureRequest) -> Study:
    return Study(scrambled_llama(replace(SMALL, **VARIANTS[request.param]), 0), TOKENS)


def transformers_arrays(model: Model, folder: Path) -> tuple[dict[str, Any], float]:
    """Every activation of transformers' modules by name, with its gradient; and the loss."""
    seen: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.retain_grad()
            seen[name] = value

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(_: Any, given: Any, out: Any) -> None:
            keep(f"{name} in", given[0] if given else None)
            keep(name, out[0] if isinstance(out, tuple) else out)

        module.register_forward_hook(hook)

    with in_float64():
        theirs = in_transformers(model, folder)
        for name, module in theirs.named_modules():
            watch(name, module)
        logits = theirs(torch.tensor(TOKENS)).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], torch.tensor(TOKENS[0, 1:]))
        loss.backward()
    return seen, float(loss.detach())


def test_every_array_that_transformers_has_is_the_same(small: Study, tmp_path: Path) -> None:
    seen, loss = transformers_arrays(small.model, tmp_path)
    config, compared = small.model.config, 0
    assert small.loss == pytest.approx(loss, rel=1e-12)
    names = {"a_11": "model.norm", "a_tok": "model.embed_tokens", "a_12": "lm_head"}
    for b in range(config.n_layer):
        layer = f"model.layers.{b}"
        names |= {
            f"{b}.a_2": f"{layer}.input_layernorm", f"{b}.a_3": f"{layer}.self_attn.o_proj in",
            f"{b}.a_4": f"{layer}.self_attn.o_proj", f"{b}.a_5": f"{layer}.post_attention_layernorm in",
            f"{b}.a_6": f"{layer}.post_attention_layernorm", f"{b}.a_g": f"{layer}.mlp.gate_proj",
            f"{b}.a_u": f"{layer}.mlp.up_proj", f"{b}.a_8": f"{layer}.mlp.down_proj in",
            f"{b}.a_9": f"{layer}.mlp.down_proj", f"{b}.a_10": layer,
        }  # fmt: skip
    for id, name in names.items():
        value, gradient = small.tensors.value(id), id.replace("a_", "Δ_").replace("Δ_tok", "Δ_1")
        assert_close(value, seen[name].detach()[0].numpy(), 1e-10, name)
        assert_close(small.tensors.value(gradient), seen[name].grad[0].numpy(), 1e-10, gradient)
        compared += 2
    for b in range(config.n_layer):
        for x, heads, prefix in (("q", config.n_head, f"{b}."), ("k", config.n_kv_head, f"{b}.kv")):
            theirs = seen[f"model.layers.{b}.self_attn.{x}_proj"]
            ours = [[small.tensors.value(f"{prefix}{h}.{s}{x}_lin") for h in range(heads)] for s in ("", "∂")]
            assert_close(np.concatenate(ours[0], axis=1), theirs.detach()[0].numpy(), 1e-10, x)
            assert_close(np.concatenate(ours[1], axis=1), theirs.grad[0].numpy(), 1e-10, f"∂{x}")
        values = [small.tensors.value(f"{b}.kv{j}.∂v") for j in range(config.n_kv_head)]
        expected = seen[f"model.layers.{b}.self_attn.v_proj"].grad[0].numpy()
        assert_close(np.concatenate(values, axis=1), expected, 1e-10, "∂v")
        compared += 5
    assert compared >= 31


def test_every_gradient_of_a_parameter_is_that_of_transformers(small: Study, tmp_path: Path) -> None:
    with in_float64():
        theirs = in_transformers(small.model, tmp_path)
        theirs(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss.backward()
    named = dict(theirs.named_parameters())
    shown = {small.tensors[g].parameter for step in small.steps for _, g in step.parameters}
    assert shown == set(small.model.params) == set(named)
    for id in {g for step in small.steps for _, g in step.parameters}:
        tensor = small.tensors[id]
        if not tensor.part and tensor.parameter is not None:
            turned = "_proj.weight" in tensor.parameter  # shown as in the formulas, (in, out)
            assert_close(tensor.value.T if turned else tensor.value, named[tensor.parameter].grad.numpy(), 1e-10, id)
    q, layer = small.model.config.key_width, "model.layers.0.self_attn.q_proj.weight"
    first = small.tensors.value("0.1.∂w_q")
    assert_close(first, named[layer].grad.numpy()[q : 2 * q].T, 1e-10, "the second head's rows")


def test_every_cell_of_every_array_is_the_sum_of_its_terms(small: Study) -> None:
    explained = [tensor for tensor in small.tensors if tensor.terms]
    assert len(explained) > 90
    for tensor in explained:
        finite = np.isfinite(tensor.value)
        with np.errstate(invalid="ignore"):
            missed = np.abs(small.tensors.sum_of_terms(tensor.id) - tensor.value)[finite]
        assert missed.max() < 1e-12 * max(1, np.abs(tensor.value[finite]).max()), tensor.id


def test_every_error_signal_and_every_parameter_has_terms_and_a_formula(small: Study) -> None:
    shown = {id for step in small.steps for id in (step.forward, step.backward) if id is not None}
    gradients = {gradient for step in small.steps for _, gradient in step.parameters}
    without = {"a_0", "0.a_3", "1.a_3"}  # given, and put together from the heads
    for id in (shown | gradients) - without:
        assert small.tensors[id].terms, id
        assert small.tensors[id].formula.text, id


def test_every_gradient_agrees_with_a_finite_difference_and_with_autograd(small: Study) -> None:
    measured = {id: one for step in small.steps for id, one in small.differences(step.id).items()}
    differentiated = {id: one for step in small.steps for id, one in small.autograds(step.id).items()}
    assert set(measured) == set(differentiated) == {tensor.id for tensor in small.tensors if tensor.is_gradient}
    assert [id for id, one in measured.items() if not one["passed"]] == []
    assert [id for id, one in differentiated.items() if not one["passed"]] == []


def test_a_shape_that_is_known_before_the_array_is_its_shape(small: Study) -> None:
    known = [tensor for tensor in small.tensors if tensor.known_shape is not None]
    assert len(known) > 100
    assert [tensor.id for tensor in known if tensor.value.shape != tensor.known_shape] == []


def test_every_equation_has_its_lines_in_the_familys_own_files(small: Study) -> None:
    tensors = small.document["tensors"]
    files = {line["file"] for one in tensors.values() for line in one.get("source", [])}
    assert {f"onfoot/ops/{name}.py" for name in ("rms_norm", "rope", "swiglu", "grouped_query")} <= files
    assert "onfoot/models/llama.py" in files and not any("gpt2" in file or "layer_norm" in file for file in files)
    (line,) = (one for one in tensors["0.Δ_5"]["source"] if one["file"].endswith("llama.py"))
    assert line["code"].startswith("d5 = ") and "skip_gradient=d10" in line["code"]


def wrong_norm(dy: Any, saved: Any) -> Any:
    dx, dweight = rms_norm_backward(dy, saved)
    return dx + 1e-4, dweight


def not_turned_back(dy: Any, saved: Any) -> Any:
    return rope_forward(dy, saved.cos, saved.sin)[0]


@pytest.mark.parametrize(("name", "wrong"), [("rms_norm", wrong_norm), ("rope", not_turned_back)])
def test_a_planted_mistake_turns_badges_red(name: str, wrong: Any) -> None:
    config = replace(SMALL, num_hidden_layers=1)
    broken = engine.Engine("numpy", {**engine.OPS, f"{name}_backward": wrong}, np.asarray)
    study = Study(Model(config, scrambled_llama(config, 0).params, "float64", broken), TOKENS)
    autograds = [one for step in study.steps for one in study.autograds(step.id).values()]
    assert any(one["passed"] for one in autograds) and sum(not one["passed"] for one in autograds) > 5
    wrong_ids = {"0.Δ_2", "Δ_1", "∂w_tok"}
    assert not any(study._difference(id)["passed"] for id in wrong_ids)


def test_keys_that_several_heads_read_have_the_sum_of_their_gradients() -> None:
    study = Study(scrambled_llama(SMALL, 0), TOKENS)
    shared = study.tensors["0.kv1.∂k"]
    assert [term.label for term in shared.terms] == [f"Δ_rawᵗ q, of head {h}" for h in (4, 5, 6)]
    step = next(step for step in study.steps if step.id == "0.4.k")
    assert step.name == "Keys, RoPE, shared by heads 4 to 6" and step.forward == "0.kv1.k"
    assert study.document["model"]["key_heads"] == 2


def test_the_other_views_work() -> None:
    study = Study(scrambled_llama(replace(SMALL, num_hidden_layers=1), 0), TOKENS)
    training = study.training
    assert np.allclose(study.tensors.value(training["drivers"]).sum(axis=1), 1, atol=1e-9)
    labels = study.tensors[training["signal_norms"]].row_labels
    assert labels is not None and {"block 1 Δ_g", "block 1 Δ_u", "block 1 Δ₁₀"} <= set(labels)
    assert study.optimizer(1e-7, 1)["actual"] == pytest.approx(study.optimizer(1e-7, 1)["predicted"], rel=2e-3)
    assert len(study.lora["layers"]) == 7
    assert sum(len(group["mistakes"]) for group in study.mistakes()["groups"]) > 80


@pytest.mark.parametrize("config", [SMALL, onfoot.GPT2Config()])
def test_no_word_of_a_formula_is_set_as_a_symbol(config: onfoot.Config) -> None:
    """As the article “a”, which would be explained as the activation."""
    for symbol, formula in all_formulas(config).items():
        assert not re.search(r"\b[aA] (?!softmax|log)[a-z]{3,}", formula.text), symbol
