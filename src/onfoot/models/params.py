"""Parameters: a plain dict from Hugging Face's tensor name to an array; their shapes, counts and initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onfoot.arrays import Shape
from onfoot.config import GPT2Config

TOKEN_TABLE = "transformer.wte.weight"
POSITION_TABLE = "transformer.wpe.weight"
HEAD = "lm_head"


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


def linear_shapes(config: GPT2Config) -> dict[str, tuple[int, int]]:
    """Every linear layer's name and (in, out), the head included: what LoRA can stand beside."""
    out = {
        f"transformer.h.{b}.{name.removesuffix('.weight')}": (shape[0], shape[1])
        for b in range(config.n_layer)
        for name, shape in block_shapes(config).items()
        if len(shape) == 2
    }
    out[HEAD] = (config.n_embd, config.vocab_size)
    return out


def part_columns(config: GPT2Config, layer: str) -> dict[str, slice]:
    """The named parts of a layer's columns: queries, keys and values of c_attn; other layers have none."""
    if not layer.endswith(".c_attn"):
        return {}
    qk, total = config.n_head * config.key_width, config.n_head * (2 * config.key_width + config.value_width)
    return {f"{layer}.q": slice(0, qk), f"{layer}.k": slice(qk, 2 * qk), f"{layer}.v": slice(2 * qk, total)}


def layer_order(config: GPT2Config) -> dict[str, int]:
    """Every layer that has parameters, numbered in the order of the forward pass."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in shapes(config))
    return {layer: i for i, layer in enumerate([*(x for x in layers if x != HEAD), HEAD])}


def count(shapes_by_name: dict[str, Shape]) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for shape in shapes_by_name.values())


def lora_count(layers: Sequence[tuple[int, int]], r: int) -> int:
    """The number of parameters of rank-r companions: r (in + out) each."""
    return sum(r * (n_in + n_out) for n_in, n_out in layers)


def initialise(config: GPT2Config, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """GPT-2's initial values: normal weights, biases 0, norms 1.

    The two projections that write into the residual stream are narrower by √(2 n_layer), so that the sum of all blocks'
    contributions starts with the same variance at any depth.
    """
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(config).items():
        if name.endswith(".bias"):
            value = np.zeros(shape)
        elif len(shape) == 1:
            value = np.ones(shape)
        else:
            std = config.initializer_range
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * config.n_layer)
            value = rng.normal(0.0, std, shape)
        out[name] = value.astype(dtype)
    return out
