"""Configurations: defaults and presets match the published models, and invalid values are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers

import onfoot
from onfoot.config import PRESETS, RopeScaling, preset
from onfoot.engine import check_dtype, get_engine

LLAMA: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip


def test_defaults_are_transformers() -> None:
    ours, theirs = onfoot.GPT2Config(), transformers.GPT2Config()
    for name in (
        "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "activation_function", "layer_norm_epsilon",
        "initializer_range", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.inner_width == 4 * 768 and ours.key_width == ours.value_width == 64
    llama, published = onfoot.LlamaConfig(), transformers.LlamaConfig()
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "rms_norm_eps", "initializer_range", "attention_bias", "mlp_bias",
    ):  # fmt: skip
        assert getattr(llama, name) == getattr(published, name), name
    assert llama.rope_theta == 10000.0 and llama.n_kv_head == 32


def test_presets_have_the_published_sizes() -> None:
    sizes = {name: ((c := preset(name)).n_embd, c.n_layer, c.n_head) for name in PRESETS}
    assert sizes == {
        "gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25),
        "paper": (768, 1, 12), "paper-12": (768, 12, 12),
    }  # fmt: skip


def test_llama_3s_ramp_has_its_published_ends() -> None:
    scaling = RopeScaling("llama3", 8.0)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert scaling.original_max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeScaling("llama3", 8.0, 4.0, 4.0), "must be above 0 and below"),
        (lambda: RopeScaling("linear", 0.5), "factor must be >= 1, got 0.5"),
        (lambda: onfoot.LlamaConfig(**LLAMA, head_dim=7), "is odd: RoPE rotates pairs"),
        (lambda: onfoot.LlamaConfig(**LLAMA, num_key_value_heads=3), "is not divisible by num_key_value_heads=3"),
        (lambda: onfoot.GPT2Config(lm_head_bias=True), "tied logits have no bias"),
        (lambda: onfoot.GPT2Config(n_embd=10, n_head=3), "not divisible"),
        (lambda: onfoot.GPT2Config(layer_norm_epsilon=0.0), "layer_norm_epsilon must be > 0, got 0.0"),
        (lambda: check_dtype("float16"), "unknown dtype 'float16'; choose from float32, float64"),
    ],
)
def test_invalid_values_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_several_tokens_may_end_a_text() -> None:
    assert onfoot.LlamaConfig(**LLAMA, eos_token_id=(3, 5)).eos_ids == (3, 5)
    assert onfoot.LlamaConfig.from_dict({**LLAMA, "eos_token_id": [3, 5]}).eos_ids == (3, 5)
    assert onfoot.LlamaConfig(**LLAMA, eos_token_id=3).eos_ids == (3,)
    assert onfoot.LlamaConfig(**LLAMA).eos_ids == () == onfoot.GPT2Config().eos_ids
    assert onfoot.GPT2Config(eos_token_id=3).eos_ids == (3,)


def test_float64_is_numpys_and_ids_have_64_bits() -> None:
    assert get_engine("auto", "float64").name == "numpy"
    assert get_engine("auto", "float32").name != "torch"
    for name in ("numpy", "torch"):
        ids = get_engine(name).integers(np.array([1, 2**40]))
        assert int(ids[1]) == 2**40
