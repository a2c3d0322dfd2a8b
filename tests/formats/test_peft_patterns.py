"""Ranks and alphas per layer, compared with PEFT: which pattern wins, and what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import onfoot
from onfoot.formats.peft import restore_adapter
from onfoot.models.model import Model
from oracles import assert_close, scrambled

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about tied heads and layouts
CONFIG = onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=2, n_head=3)
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 9))
FC, ATTN = "transformer.h.{}.mlp.c_fc", "transformer.h.{}.attn.c_attn"


def base(config: onfoot.GPT2Config = CONFIG) -> Model:
    return Model(config, scrambled(onfoot.create(config).params, 0), "float64", "numpy")


def away_from_start(model: Model) -> Model:
    rng = np.random.default_rng(1)
    for name in sorted(model.trainable):
        model.params[name] = rng.normal(0, 0.3, model.params[name].shape)
    return model


# PEFT saves the keys of its patterns sorted; if several match, the first in the file counts
PATTERNS: dict[str, dict[str, Any]] = {
    "the wide one first": {
        "rank_pattern": {"c_fc": 5, "h.1.mlp.c_fc": 2},
        "alpha_pattern": {"c_fc": 7, "transformer.h.1.mlp.c_fc": 11},
    },
    "the narrow one first": {
        "rank_pattern": {"h.1.mlp.c_fc": 2, "mlp.c_fc": 5},
        "alpha_pattern": {r"h\.1\..*c_fc": 11, "mlp.c_fc": 7},
    },
    "regular expressions": {
        "rank_pattern": {r".*\.h\.0\..*": 2, r"c_(attn|fc)": 6},
        "alpha_pattern": {r"h\.[01]\.attn\.c_attn": 9},
    },
    "alphas without ranks": {"alpha_pattern": {"c_attn": 1, "c_fc": 30}},
    "not the end of a name": {"rank_pattern": {"attn": 2, "c_f": 2, "fc": 2}, "alpha_pattern": {"_fc": 20, "mlp": 20}},
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"c_fc": 5}, "alpha_pattern": {"c_attn": 9}},
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT's, about patterns that match nothing
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_match_the_same_layers_as_in_peft(tmp_path: Path, name: str) -> None:
    model = base()
    model.save(tmp_path / "base")
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64),
        LoraConfig(
            r=4, lora_alpha=6, task_type="CAUSAL_LM", fan_in_fan_out=True, target_modules=["c_attn", "c_fc"],
            **PATTERNS[name],
        ),
    ).double()  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter, p in theirs.named_parameters():
            if "lora_" in parameter:
                p.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    adapter = model.adapters[model.active_adapter or ""]
    modules = dict(theirs.base_model.model.named_modules())
    assert len(adapter.layers) == 4
    for layer, ours in adapter.layers.items():
        r, scale = modules[layer].r["default"], modules[layer].scaling["default"]
        assert (ours.r, ours.scale) == (r, pytest.approx(scale)), layer
    expected = theirs.eval()(torch.tensor(TOKENS)).logits.detach().numpy()
    assert_close(model.logits(TOKENS), expected, 1e-10)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize(
    "targets",
    [["c_attn.q", "c_attn.v"], ["c_attn.k", "c_fc"], ["c_attn.q", "c_attn.k", "c_attn.v", "mlp.c_proj"]],
    ids=str,
)
def test_parts_are_written_as_one_adapter_of_the_same_scale(
    tmp_path: Path, targets: list[str], use_rslora: bool
) -> None:
    model = base(onfoot.GPT2Config(**{**vars(CONFIG), "n_embd": 18}))
    model.save(tmp_path / "base")
    model.add_lora(r=3, alpha=5, targets=targets, use_rslora=use_rslora)
    away_from_start(model)
    right = model.logits(TOKENS)
    model.save_adapter(tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter").double().eval()
    assert_close(theirs(torch.tensor(TOKENS)).logits.detach().numpy(), right, 1e-6)  # PEFT computes in float32
    again = onfoot.load(tmp_path / "base", "float64", "numpy")
    again.load_adapter(tmp_path / "adapter")
    assert_close(again.logits(TOKENS), right, 1e-12)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] is True and config["use_rslora"] is use_rslora
    same = base(model.config)
    same.add_lora(r=3, alpha=5, targets=targets, use_rslora=use_rslora)
    restore_adapter(same, tmp_path / "adapter")
    for name in model.trainable:
        np.testing.assert_array_equal(same.params[name], model.params[name], err_msg=name)


def test_a_head_is_stored_transposed(tmp_path: Path) -> None:
    model = base()
    model.add_lora(r=2, targets=["c_fc", "lm_head"])
    model.save_adapter(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is False


def test_an_adapters_dropout_comes_back_and_acts(tmp_path: Path) -> None:
    model = base()
    model.add_lora(r=2, alpha=2, targets=["c_fc"], dropout=0.5)
    away_from_start(model).save_adapter(tmp_path)
    again = base()
    again.load_adapter(tmp_path)
    assert {layer.dropout for layer in again.adapters["default"].layers.values()} == {0.5}
    losses = [one.loss_and_grads(TOKENS, dropout_seed=3)[0] for one in (model, again)]
    assert losses[0] == losses[1] != model.loss(TOKENS)


def saved(tmp_path: Path) -> Model:
    model = base()
    model.add_lora(r=3, alpha=5, targets=["c_fc", "lm_head"])
    away_from_start(model).save_adapter(tmp_path)
    return model


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r must be an integer from 1 to .*, got 0"),
        ({"r": True}, "r must be an integer from 1 to .*, got True"),
        ({"r": 2.0}, "r must be an integer from 1 to .*, got 2.0"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"rank_pattern": {"c_fc": 2}}, r"lora_A.weight has shape \(3, 12\); .* expect \(2, 12\)"),
        ({"rank_pattern": {"(": 2}}, "is not a valid regular expression"),
    ],
    ids=str,
)
def test_unsupported_options_are_rejected_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        base().load_adapter(tmp_path)


def test_both_matrices_of_a_layer_must_have_its_shape(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for side, shape in (("A", (3, 11)), ("B", (47, 3))):
        name = f"base_model.model.{FC.format(1)}.lora_{side}.weight"
        save_file({**tensors, name: np.zeros(shape)}, path)
        with pytest.raises(ValueError, match=rf"lora_{side}.weight has shape \({shape[0]}, {shape[1]}\)"):
            base().load_adapter(tmp_path)
        save_file({k: v for k, v in tensors.items() if k != name}, path)
        with pytest.raises(ValueError, match=rf"{FC.format(1)}.lora_{side}.weight is missing"):
            base().load_adapter(tmp_path)


def test_the_saved_weight_of_a_tied_head_must_equal_the_models(tmp_path: Path) -> None:
    model = saved(tmp_path)
    path, name = tmp_path / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(path)
    table = model.params["transformer.wte.weight"]
    save_file({**tensors, name: table}, path)
    again = base()
    again.load_adapter(tmp_path)
    assert_close(again.logits(TOKENS), model.logits(TOKENS), 1e-12)
    save_file({**tensors, name: table + 0.01}, path)
    with pytest.raises(ValueError, match=r"lm_head\.base_layer\.weight'? differs from the model's"):
        base().load_adapter(tmp_path)
