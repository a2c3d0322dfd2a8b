"""LoRA on LLaMA, Mistral, Qwen2 and Qwen3, against PEFT on the same model; adapters and folders in and out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import onfoot
from llama_oracle import batch, in_float64, in_transformers, loss_and_grads, random_config, scrambled_llama
from onfoot.arrays import to_numpy
from onfoot.models.llama_params import TARGETS
from onfoot.models.model import Model
from oracles import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about tied heads
SMALL = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=32, rope_theta=50.0,
)  # fmt: skip
TOKENS, ITS_TARGETS = batch(SMALL, 0)


def away_from_start(model: Model, seed: int = 1) -> Model:
    rng = np.random.default_rng(seed)
    for name in sorted(model.trainable):
        model.params[name] = model.engine.floats(rng.normal(0, 0.3, tuple(model.params[name].shape)), model.dtype)
    return model


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "v_proj"), ("down_proj", "lm_head")], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_loss_and_every_adapter_gradient_equal_pefts(
    tmp_path: Path, ratio: int, kind: str, targets: tuple[str, ...]
) -> None:
    config = random_config(
        ratio, ratio, ratio == 2, kind, head_dim=4, vocab_size=19, sliding_window=4 if kind == "mistral" else None
    )
    model = scrambled_llama(config, 0)
    tokens, wanted = batch(config, 0)
    with in_float64():
        theirs = in_transformers(model, tmp_path)
        model.add_lora(r=2, alpha=5, targets=targets)
        away_from_start(model)
        lora = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=5, target_modules=list(targets))
        theirs = get_peft_model(theirs, lora).to(torch.float64).eval()
        state = {f"base_model.model.{name}": torch.tensor(model.params[name]) for name in model.trainable}
        assert not theirs.load_state_dict(state, strict=False).unexpected_keys
        logits, expected_loss, expected = loss_and_grads(theirs, tokens, wanted)
    assert_close(model.logits(tokens), logits, 1e-10, "logits")
    loss, grads = model.loss_and_grads(tokens, wanted)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert {f"base_model.model.{name}" for name in grads} == set(expected)
    for name, grad in grads.items():
        assert_close(grad, expected[f"base_model.model.{name}"], 1e-10, name)


def test_without_targets_lora_stands_beside_every_layer_of_the_blocks() -> None:
    model = scrambled_llama(SMALL, 0)
    model.add_lora(r=2)
    assert len(model.adapters["default"].layers) == 2 * 7
    assert {layer.rsplit(".", 1)[-1] for layer in model.adapters["default"].layers} == set(TARGETS)


@pytest.mark.parametrize(
    ("targets", "linears"),
    [
        (["lm_head"], 1),
        (["model.layers.1.mlp.down_proj"], 8),
        (["model.layers.1.self_attn.q_proj"], 8),
        (["model.layers.0.mlp.down_proj"], 15),
    ],
    ids=str,
)
def test_nothing_is_computed_below_the_lowest_block_that_trains(targets: list[str], linears: int) -> None:
    model = scrambled_llama(SMALL, 0)
    model.add_lora(r=1, alpha=1, targets=targets)
    calls: list[str] = []

    def counted(name: str) -> Any:
        def backward(dy: Any, saved: Any) -> Any:
            calls.append(name)
            return table[name](dy, saved)

        return backward

    table = model.engine.table
    model.engine.table = {**table, **{n: counted(n) for n in table if n.endswith("_backward")}}
    _, grads = model.loss_and_grads(TOKENS)
    assert set(grads) == model.trainable
    assert sum(c in ("frozen_linear_backward", "lora_linear_backward") for c in calls) == linears
    assert "linear_backward" not in calls and "embedding_backward" not in calls


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_adapters_go_to_peft_and_come_back(tmp_path: Path, kind: str) -> None:
    model = scrambled_llama(replace(SMALL, model_type=kind), 0, "float32")
    model.save(tmp_path / "base")
    plain = model.logits(TOKENS)
    model.source = str(tmp_path / "base")
    model.add_lora(r=3, alpha=6)
    away_from_start(model)
    ours = model.logits(TOKENS)
    model.save_adapter(tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    logits = theirs(torch.tensor(TOKENS)).logits.detach().numpy()
    assert_close(logits, ours, 1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = onfoot.load(tmp_path / "theirs")  # the adapter's folder names its base
    assert (again.logits(TOKENS) == ours).all()
    assert np.abs(ours - plain).max() > 1e-2
    for name in model.trainable:
        assert (again.params[name] == model.params[name]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_merged_equals_unmerged_and_can_be_taken_back(tmp_path: Path, tied: bool) -> None:
    model = scrambled_llama(replace(SMALL, tie_word_embeddings=tied), 0)
    plain = model.logits(TOKENS)
    model.add_lora(r=2, alpha=3, targets=[*TARGETS, "lm_head"])
    away_from_start(model)
    unmerged = model.logits(TOKENS)
    model.merge_adapter()
    assert_close(model.logits(TOKENS), unmerged, 1e-12)
    model.save(tmp_path)
    assert_close(onfoot.load(tmp_path, dtype="float64").logits(TOKENS), unmerged, 1e-12)
    model.unmerge_adapter()
    model.use_adapter(None)
    assert_close(model.logits(TOKENS), plain, 1e-12)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", [None, "linear", "llama3"])
def test_folders_of_transformers_are_read_and_written_back(tmp_path: Path, kind: str, scaling: str | None) -> None:
    rope = {"rope_theta": 500.0, "rope_type": scaling or "default"}
    if scaling:
        rope["factor"] = 4.0
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            kind, vocab_size=23, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, max_position_embeddings=32, rope_parameters=rope, eos_token_id=[3, 5],
            initializer_range=0.3, **({"sliding_window": 3} if kind == "mistral" else {}),
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    model = onfoot.load(tmp_path / "theirs")
    assert model.config.model_type == kind and model.config.eos_ids == (3, 5)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert_close(model.logits(TOKENS), expected, 1e-5)
    model.save(tmp_path / "ours")
    assert onfoot.load(tmp_path / "ours").config == model.config
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(theirs)
    with torch.no_grad():
        assert (back(torch.tensor(TOKENS)).logits.numpy() == expected).all()
    for name, value in theirs.state_dict().items():
        assert (to_numpy(model.params[name]) == value.numpy()).all()


def test_the_names_of_older_folders_are_understood(tmp_path: Path) -> None:
    model = scrambled_llama(replace(SMALL, rope_scaling={"rope_type": "linear", "factor": 2.0}), 0, "float32")
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (onfoot.load(tmp_path).logits(TOKENS) == model.logits(TOKENS)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"config\.json: hidden_act='gelu' is not supported, only 'silu'"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; supported: gpt2, llama, mistral, qwen2"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types .* are not supported"),
        ({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 1.0}},
         "partial_rotary_factor=0.5 is not supported"),
        ({"num_key_value_heads": 2}, r"k_proj\.weight has shape \(12, 24\); config.json expects \(8, 24\)"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.2\.input_layernorm\.weight is missing"),
    ],
    ids=str,
)  # fmt: skip
def test_folders_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    scrambled_llama(SMALL, 0).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        onfoot.load(tmp_path)
