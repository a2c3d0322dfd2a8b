"""Configurations of a step: small models of both families, what trains in them, and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import onfoot
from onfoot.models.model import Model
from onfoot.models.params import quantizable
from onfoot.ops.cross_entropy import IGNORE
from onfoot.quantized import HalfWeight, rounded

SIZES: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 24, "vocab_size": 61}
LLAMA_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "vocab_size": 61,
}


def config_of(family: str, **changes: Any) -> Any:
    """A small configuration."""
    if family == "gpt2":
        return onfoot.GPT2Config(**{**SIZES, **changes})
    return onfoot.LlamaConfig(**{**LLAMA_SIZES, **changes})


def scrambled_model(config: Any, seed: int = 0, engine: str = "numba", dtype: str = "float32") -> Model:
    """A model away from its initial values: norms not 1, biases not 0."""
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(1.0 if ".ln_" in name or "norm" in name else 0.0, 0.2, value.shape).astype(np.float32)
        for name, value in onfoot.create(config, engine="numpy").params.items()
    }
    return Model(config, params, dtype, engine)


def scramble_adapter(model: Model, seed: int = 1) -> None:
    """An adapter with an effect: B is not 0."""
    rng = np.random.default_rng(seed)
    for name in sorted(name for name in model.params if ".lora_" in name):
        model.params[name][...] = rng.normal(0, 0.2, model.params[name].shape)


def lora(**options: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.add_lora(**{"r": 3, "alpha": 6, **options})
        scramble_adapter(model)

    return change


def quantized(kind: str, **options: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.quantize(kind)
        lora(**options)(model)

    return change


def in_16_bits(kind: str, **options: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for name, out_in in quantizable(model.config).items():
            weight = np.asarray(model.params[name])
            half = HalfWeight(kind, rounded(weight if out_in else weight.T, kind))
            model.params[name] = half if out_in else half.T
        lora(**options)(model)

    return change


def only(*ends: str) -> Callable[[Model], None]:
    """Makes only the parameters trainable whose names contain one of these."""

    def change(model: Model) -> None:
        model.trainable = {name for name in model.trainable if any(end in name for end in ends)}
        assert model.trainable or not ends

    return change


def recompute(model: Model) -> None:
    model.recompute = True


def as_it_is(model: Model) -> None:
    pass


class Policy(NamedTuple):
    """A model, changes to it, and the inputs of a step."""

    family: str
    fields: Mapping[str, Any] = MappingProxyType({})
    change: Callable[[Model], None] = as_it_is
    drops: bool = False
    packed: bool = False
    few: bool = False  # targets

    def model(self, engine: str = "numba", dtype: str = "float32") -> Model:
        made = scrambled_model(config_of(self.family, **self.fields), 0, engine, dtype)
        self.change(made)
        return made

    def batch(self, seed: int = 0, sequences: int = 6, n: int = 11) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Tokens, targets and options."""
        rng = np.random.default_rng([seed, sequences, n])
        tokens, targets = rng.integers(0, 61, (2, sequences, n))
        targets[rng.random(targets.shape) < (0.8 if self.few else 0.05)] = IGNORE
        targets[:, 0] = 5
        options: dict[str, Any] = {"dropout_seed": seed} if self.drops else {}
        if self.packed:
            options["segments"] = np.cumsum(rng.random((sequences, n)) < 0.2, axis=1)
        return tokens, targets, options


ODD = {"causal": False, "qk_head_dim": 5, "head_dim": 9, "activation_function": "relu"}
UNTIED = {"tie_word_embeddings": False}
MISTRAL = {"model_type": "mistral", "sliding_window": 4}
ONE_WINDOW = {"sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")}
POLICIES: Mapping[str, Policy] = {
    "gpt2": Policy("gpt2"),
    "gpt2 untied": Policy("gpt2", {**UNTIED, "lm_head_bias": True}),
    "gpt2 of the paper": Policy("gpt2", ODD),
    "gpt2 erf": Policy("gpt2", {"activation_function": "gelu"}),
    "gpt2 few targets": Policy("gpt2", few=True),
    "gpt2 packed": Policy("gpt2", packed=True),
    "gpt2 recompute": Policy("gpt2", change=recompute),
    "gpt2 dropout": Policy("gpt2", {"embd_pdrop": 0.2, "resid_pdrop": 0.3}, drops=True),
    "gpt2 dropout in attention": Policy("gpt2", {"attn_pdrop": 0.2}, drops=True),
    "gpt2 dropout, recompute": Policy("gpt2", {"embd_pdrop": 0.2, "resid_pdrop": 0.3}, recompute, drops=True),
    "gpt2 lora": Policy("gpt2", change=lora()),
    "gpt2 lora, few targets": Policy("gpt2", change=lora(), few=True),
    "gpt2 lora, dropout": Policy("gpt2", change=lora(dropout=0.3), drops=True),
    "gpt2 lora on parts": Policy("gpt2", change=lora(targets=["c_attn.q", "c_attn.v"])),
    "gpt2 lora on the head": Policy("gpt2", change=lora(targets=["lm_head", "c_fc"])),
    "gpt2 lora on the head, few targets": Policy("gpt2", UNTIED, lora(targets=["lm_head"]), few=True),
    "gpt2 last block": Policy("gpt2", change=only("h.1.")),
    "gpt2 norms": Policy("gpt2", change=only("ln_")),
    "gpt2 tables": Policy("gpt2", UNTIED, only("wte", "wpe")),
    "gpt2 head": Policy("gpt2", UNTIED, only("lm_head"), few=True),
    "gpt2 nothing": Policy("gpt2", change=only()),
    "gpt2 Q8_0": Policy("gpt2", change=quantized("Q8_0")),
    "gpt2 Q4_1": Policy("gpt2", change=quantized("Q4_1", dropout=0.2), drops=True),
    "gpt2 Q4_0": Policy("gpt2", UNTIED, quantized("Q4_0")),
    "gpt2 BF16": Policy("gpt2", change=in_16_bits("BF16", dropout=0.2), drops=True),
    "gpt2 F16": Policy("gpt2", UNTIED, in_16_bits("F16")),
    "llama": Policy("llama", UNTIED),
    "llama tied": Policy("llama", {"tie_word_embeddings": True}),
    "llama few targets": Policy("llama", UNTIED, few=True),
    "llama packed": Policy("llama", UNTIED, packed=True),
    "llama recompute": Policy("llama", UNTIED, recompute),
    "llama dropout in attention": Policy("llama", {**UNTIED, "attention_dropout": 0.2}, drops=True),
    "llama lora": Policy("llama", UNTIED, lora()),
    "llama lora, dropout, packed": Policy("llama", UNTIED, lora(dropout=0.3), drops=True, packed=True),
    "llama norms": Policy("llama", UNTIED, only("norm")),
    "llama Q8_0": Policy("llama", UNTIED, quantized("Q8_0")),
    "llama Q4_1": Policy("llama", {"tie_word_embeddings": True}, quantized("Q4_1")),
    "llama BF16": Policy("llama", {"tie_word_embeddings": True}, in_16_bits("BF16")),
    "llama F16": Policy("llama", UNTIED, in_16_bits("F16")),
    "qwen2": Policy("llama", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen2, a window in one layer": Policy("llama", {"model_type": "qwen2", **ONE_WINDOW}, packed=True),
    "mistral": Policy("llama", MISTRAL),
    "mistral recompute, packed": Policy("llama", MISTRAL, recompute, packed=True),
    "mistral lora, dropout": Policy("llama", {**MISTRAL, "attention_dropout": 0.2}, lora(dropout=0.3), drops=True),
    "qwen3": Policy("llama", {"model_type": "qwen3", "head_dim": 10}),
    "qwen3 lora, packed": Policy("llama", {"model_type": "qwen3"}, lora(), packed=True),
    "qwen3 recompute": Policy("llama", {"model_type": "qwen3", **ONE_WINDOW}, recompute),
    "qwen3 norms": Policy("llama", {"model_type": "qwen3"}, only("q_norm", "k_norm")),
    "qwen3 Q8_0": Policy("llama", {"model_type": "qwen3"}, quantized("Q8_0")),
}  # fmt: skip
