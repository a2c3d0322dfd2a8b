"""GPT-2's parameters: names, shapes and the standard deviations of the initial values."""

from __future__ import annotations

import math

from onfoot.arrays import Shape
from onfoot.config import GPT2Config

PREFIX = "transformer."
BLOCKS = "transformer.h."  # prefix of the blocks' parameters
TOKEN_TABLE = "transformer.wte.weight"
POSITION_TABLE = "transformer.wpe.weight"
HEAD = "lm_head"
OUT_IN = False  # blocks' weights are stored (in, out)
TARGETS = ("c_attn", "c_proj", "c_fc")  # LoRA's default targets: a block's linear layers


def block_shapes(config: GPT2Config) -> dict[str, Shape]:
    """Name within a block -> shape. Weights of linear layers are (in, out)."""
    d, inner = config.n_embd, config.inner_width
    queries_keys_values = config.n_head * (2 * config.key_width + config.value_width)
    return {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        "attn.c_attn.weight": (d, queries_keys_values),
        "attn.c_attn.bias": (queries_keys_values,),
        "attn.c_proj.weight": (config.n_head * config.value_width, d),
        "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,),
        "ln_2.bias": (d,),
        "mlp.c_fc.weight": (d, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, d),
        "mlp.c_proj.bias": (d,),
    }


def shapes(config: GPT2Config) -> dict[str, Shape]:
    """Every parameter's name and shape, in the order of the forward pass. The head is stored (vocabulary, width)."""
    d = config.n_embd
    out: dict[str, Shape] = {TOKEN_TABLE: (config.vocab_size, d), POSITION_TABLE: (config.n_positions, d)}
    for b in range(config.n_layer):
        for name, shape in block_shapes(config).items():
            out[f"transformer.h.{b}.{name}"] = shape
    out["transformer.ln_f.weight"] = (d,)
    out["transformer.ln_f.bias"] = (d,)
    if not config.tie_word_embeddings:
        out[f"{HEAD}.weight"] = (config.vocab_size, d)
    if config.lm_head_bias:
        out[f"{HEAD}.bias"] = (config.vocab_size,)
    return out


def part_columns(config: GPT2Config, layer: str) -> dict[str, slice]:
    """The named parts of a layer's columns: queries, keys and values of c_attn; other layers have none."""
    if not layer.endswith(".c_attn"):
        return {}
    qk, total = config.n_head * config.key_width, config.n_head * (2 * config.key_width + config.value_width)
    return {f"{layer}.q": slice(0, qk), f"{layer}.k": slice(qk, 2 * qk), f"{layer}.v": slice(2 * qk, total)}


def initial_std(config: GPT2Config, name: str) -> float:
    """The standard deviation of a weight's initial values.

    The two projections that write into the residual stream are divided by √(2 n_layer), so that the sum of all blocks'
    contributions starts with the same variance at any depth.
    """
    return config.initializer_range / (math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1)
