"""The LLaMA family's parameters: names, shapes and the standard deviations of the initial values."""

from __future__ import annotations

from onfoot.arrays import Shape
from onfoot.config import LlamaConfig

PREFIX = "model."
BLOCKS = "model.layers."  # prefix of the blocks' parameters
TOKEN_TABLE = "model.embed_tokens.weight"
HEAD = "lm_head"
OUT_IN = True  # every weight is stored (out, in), as in nn.Linear
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def block_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Name within a block -> shape. Weights of linear layers are (out, in)."""
    d, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.n_head * config.key_width, config.n_kv_head * config.key_width
    qkv_bias = config.attention_bias or config.model_type == "qwen2"
    out: dict[str, Shape] = {"input_layernorm.weight": (d,)}
    for name, n_in, n_out, bias in (
        ("self_attn.q_proj", d, queries, qkv_bias),
        ("self_attn.k_proj", d, keys, qkv_bias),
        ("self_attn.v_proj", d, keys, qkv_bias),
        ("self_attn.o_proj", queries, d, config.attention_bias),
        ("mlp.gate_proj", d, inner, config.mlp_bias),
        ("mlp.up_proj", d, inner, config.mlp_bias),
        ("mlp.down_proj", inner, d, config.mlp_bias),
    ):
        if name == "mlp.gate_proj":
            out["post_attention_layernorm.weight"] = (d,)
        out[f"{name}.weight"] = (n_out, n_in)
        if bias:
            out[f"{name}.bias"] = (n_out,)
        if config.qk_norm and name in ("self_attn.q_proj", "self_attn.k_proj"):
            out[name.replace("_proj", "_norm.weight")] = (config.key_width,)
    return out


def shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Every parameter's name and shape, in the order of the forward pass."""
    out: dict[str, Shape] = {TOKEN_TABLE: (config.vocab_size, config.hidden_size)}
    for b in range(config.num_hidden_layers):
        for name, shape in block_shapes(config).items():
            out[f"{BLOCKS}{b}.{name}"] = shape
    out["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        out[f"{HEAD}.weight"] = (config.vocab_size, config.hidden_size)
    return out


def part_columns(config: LlamaConfig, layer: str) -> dict[str, slice]:
    """No layer has parts: queries, keys and values are separate layers."""
    return {}


def initial_std(config: LlamaConfig, name: str) -> float:
    """The standard deviation of a weight's initial values: the same for all, as in transformers."""
    return config.initializer_range
