"""Names, shapes and initial values of parameters, against transformers' own models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import onfoot
from onfoot.models.params import initialise, lora_count, part_columns, shapes

SIZES: dict[str, Any] = {"vocab_size": 500, "n_positions": 64, "n_embd": 96, "n_layer": 8, "n_head": 3}
LLAMA: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_initial_values_are_spread_as_transformers_spreads_them() -> None:
    torch.manual_seed(0)
    theirs = dict(GPT2LMHeadModel(GPT2Config(**SIZES)).named_parameters())
    ours = initialise(onfoot.GPT2Config(**SIZES), 0, "float32")
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert value.shape == tuple(theirs[name].shape), name
        if value.ndim == 1:
            np.testing.assert_array_equal(value, theirs[name].detach().numpy(), err_msg=name)
        else:
            assert value.std() == pytest.approx(float(theirs[name].std()), rel=0.08), name
            assert abs(value.mean()) < 0.1 * value.std(), name
    narrow = ours["transformer.h.0.attn.c_proj.weight"].std()
    assert narrow == pytest.approx(0.02 / 4, rel=0.05)  # √(2 · 8)


def test_a_seed_is_a_set_of_values() -> None:
    config = onfoot.GPT2Config(**SIZES)
    first, again, other = (initialise(config, seed, "float32") for seed in (1, 1, 2))
    name = "transformer.h.0.mlp.c_fc.weight"
    assert (first[name] == again[name]).all() and (first[name] != other[name]).any()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_llamas_names_and_shapes_are_transformers(family: str, tied: bool) -> None:
    settings = {**LLAMA, "tie_word_embeddings": tied}
    theirs: Any = (
        LlamaForCausalLM(LlamaConfig(**settings)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**settings))
    )
    expected = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert shapes(onfoot.LlamaConfig(**settings, model_type=family)) == expected


def test_the_parts_of_c_attn_are_queries_keys_and_values() -> None:
    config = onfoot.GPT2Config(**{**SIZES, "head_dim": 5, "qk_head_dim": 7})
    layer = "transformer.h.0.attn.c_attn"
    assert shapes(config)[f"{layer}.weight"] == (96, 3 * (7 + 7 + 5))
    assert part_columns(config, layer) == {
        f"{layer}.q": slice(0, 21), f"{layer}.k": slice(21, 42), f"{layer}.v": slice(42, 57),
    }  # fmt: skip
    assert part_columns(config, "transformer.h.0.mlp.c_fc") == {}
    assert lora_count([(10, 20), (30, 40)], 3) == 3 * 100
