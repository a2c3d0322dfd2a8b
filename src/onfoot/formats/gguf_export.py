"""Exports models and LoRA adapters as GGUF files for llama.cpp and Ollama.

Weights that came from a GGUF file and did not change are copied from it, block by block, whatever their type.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.config import Config, GPT2Config, LlamaConfig
from onfoot.formats.files import open_file, shown
from onfoot.formats.gguf import FLOATS, Entry, GgufFile
from onfoot.formats.gguf_model import (
    ROPE_FACTORS,
    Params,
    architecture_of,
    find_file,
    gguf_name,
    is_transposed,
    permuted,
    permuted_heads,
    read_config,
)
from onfoot.formats.gguf_tokenizer_write import tokenizer_metadata
from onfoot.formats.gguf_write import WRITABLE, Tensor, float_tensor, quantized_tensor, write_gguf
from onfoot.formats.huggingface import is_model_folder, tensor_summary
from onfoot.formats.peft import join
from onfoot.models.params import HEAD, quantizable, shapes
from onfoot.ops.rope import frequencies
from onfoot.quantized import Quantized, QuantizedWeight, Transposed

if TYPE_CHECKING:
    from onfoot.models.model import Model

EXPORT_TYPES = tuple(name.lower() for name in WRITABLE)
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # llama.cpp's general.file_type
COPY_BYTES = 1 << 20
# The fields of a configuration that a GGUF file holds, or that do not change the trained network. A model whose other
# fields differ from their defaults is refused.
HELD = {
    GPT2Config: {
        "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon",
        "initializer_range", "embd_pdrop", "attn_pdrop", "resid_pdrop", "tie_word_embeddings", "bos_token_id",
        "eos_token_id",
    },
    LlamaConfig: {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "initializer_range",
        "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "attention_dropout", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "model_type", "sliding_window",
    },
}  # fmt: skip


def export_model(model: Model, path: str | Path, type_: str | None = None) -> dict[str, int]:
    """Writes a model as a GGUF file; returns the number of tensors of each type.

    Matrices are stored in the type ("f16", "q8_0", ...), by default as in the model's own files; norms, biases and
    GPT-2's positions as f32. Raises ValueError before anything is written if GGUF cannot hold the model.
    """
    check_type(type_)
    if model.active_adapter is not None:
        raise ValueError(
            f"the adapter {model.active_adapter!r} is not in the weights; merge it, or export it with export_adapter"
        )
    config, source = model.config, _source_file(model)
    check_config(config)
    default = _stored_type(model, source) if type_ is None else type_.upper()
    originals = None if source is None or type_ is not None else Params(source, read_config(source), False)
    tensors = [_tensor(model, name, originals, default, type_ is None) for name in shapes(config)]
    scaling = config.rope_scaling if isinstance(config, LlamaConfig) else None
    if scaling is not None and scaling.rope_type == "llama3":
        plain = frequencies(config.rope_theta, config.key_width)
        divisors = plain / frequencies(config.rope_theta, config.key_width, scaling)
        tensors.append(float_tensor(ROPE_FACTORS, divisors.shape, "F32", lambda: divisors))
    matrices = Counter(tensor.type for tensor in tensors if len(tensor.shape) == 2)
    metadata = _model_metadata(model, source, matrices.most_common(1)[0][0])
    write_gguf(path, metadata | tokenizer_metadata(model.tokenizer, config), tensors)
    return dict(Counter(tensor.type for tensor in tensors))


def check_type(type_: str | None) -> None:
    if type_ is not None and type_ not in EXPORT_TYPES:
        raise ValueError(f"unknown type {type_!r}; choose from {', '.join(EXPORT_TYPES)}")


def check_config(config: Config) -> None:
    """Raises ValueError for a network that GGUF and llama.cpp do not have."""
    if type(config) not in HELD:
        raise ValueError(f"a {config.model_type} model cannot be a GGUF file, only GPT-2 and the LLaMA family")
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in HELD[type(config)] or value == field.default:
            continue
        if field.name in ("head_dim", "qk_head_dim") and value * config.n_head == config.n_embd:
            continue
        raise ValueError(f"GGUF cannot hold a {config.model_type} model with {field.name}={shown(value)}")
    if isinstance(config, LlamaConfig):
        scaling = config.rope_scaling
        if config.sliding_window is not None and config.sliding_window < config.n_positions:
            raise ValueError(
                f"llama.cpp has no sliding window for {config.model_type}: its window of {config.sliding_window} is "
                f"less than the model's {config.n_positions} positions"
            )
        if scaling is not None and scaling.rope_type not in ("linear", "llama3"):
            raise ValueError(f"GGUF cannot hold a model with rope scaling {shown(scaling.rope_type)}")


def _source_file(model: Model) -> GgufFile | None:
    """The GGUF file that a model was loaded from, if it is still there."""
    path = None if model.source is None else find_file(model.source)
    if path is None or not os.path.exists(path):
        return None
    file = GgufFile(path)
    return file if file.metadata.get("general.architecture") == architecture_of(model.config) else None


def _stored_type(model: Model, source: GgufFile | None) -> str:
    """The type of most matrices in a model's own files; F16 if they are quantised, F32 if there are no files."""
    if source is not None:
        types = Counter(entry.type for entry in source.tensors.values() if len(entry.shape) == 2)
        kind = types.most_common(1)[0][0]
        return kind if kind in FLOATS else "F16"
    if model.source is None or not is_model_folder(model.source):
        return "F32"
    dtypes = Counter(dtype for _, shape, dtype in tensor_summary(model.source) if len(shape) == 2)
    kind = dtypes.most_common(1)[0][0]
    return kind if kind in FLOATS else "F32"


def _tensor(model: Model, name: str, originals: Params | None, default: str, keep_blocks: bool) -> Tensor:
    """A parameter as it is written: copied from its file if it did not change, otherwise in the default type."""
    config, value, theirs = model.config, model.params[name], gguf_name(name)
    if originals is not None and name in originals and np.array_equal(np.asarray(value), originals[name]):
        path, entry = originals.stored(name)
        return Tensor(theirs, entry.shape, entry.type, entry.n_bytes, lambda: _copied(path, entry))
    if isinstance(value, Quantized):
        weight: Any = value.T if isinstance(value, Transposed) else value  # (out, in)
        weight = _in_file_order(weight, config, name, transpose=False)
        writable = isinstance(weight, QuantizedWeight) and weight.kind in WRITABLE
        if writable and (keep_blocks or weight.kind == default):
            return quantized_tensor(theirs, weight)
        return float_tensor(theirs, weight.shape, default, lambda: np.asarray(weight))
    shape = tuple(value.shape)[::-1] if is_transposed(config, name) else tuple(value.shape)
    kind = default if name in quantizable(config) else "F32"
    return float_tensor(theirs, shape, kind, lambda: _in_file_order(to_numpy(value), config, name))


def _in_file_order(value: Any, config: Config, name: str, transpose: bool = True) -> Any:
    """A parameter with rows and columns as in a file."""
    heads = permuted_heads(config, name)
    value = value if heads is None else permuted(value, heads)
    return value.T if transpose and is_transposed(config, name) else value


def _copied(path: Path, entry: Entry) -> Iterator[bytes]:
    """The bytes of a tensor in a file."""
    with open_file(path) as file:
        file.seek(entry.begin)
        for begin in range(0, entry.n_bytes, COPY_BYTES):
            yield file.read(min(COPY_BYTES, entry.n_bytes - begin))


def _model_metadata(model: Model, source: GgufFile | None, type_: str) -> dict[str, Any]:
    """The keys general.* and those of the architecture."""
    config, arch = model.config, architecture_of(model.config)
    file_type = FILE_TYPES.get(type_, 0 if source is None else source.metadata.get("general.file_type", 0))
    about = {} if source is None else source.metadata  # licence, authors, languages
    out: dict[str, Any] = {
        key: value for key, value in about.items() if key.startswith("general.") and isinstance(value, str)
    }
    out |= {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": out.get("general.name", _name(model)),
        "general.file_type": int(file_type),
        "general.quantization_version": 2,
    }
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.inner_width,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head,
    }
    if isinstance(config, GPT2Config):
        values["attention.layer_norm_epsilon"] = float(config.layer_norm_epsilon)
    else:
        values |= {
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "attention.key_length": config.key_width,
            "attention.value_length": config.value_width,
            "rope.dimension_count": config.key_width,
            "rope.freq_base": float(config.rope_theta),
        }
        if config.rope_scaling is not None and config.rope_scaling.rope_type == "linear":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_scaling.factor)}
    return out | {f"{arch}.{key}": value for key, value in values.items()}


def _name(model: Model) -> str:
    """A name for a model: that of its run, folder or file."""
    if model.source is None:
        return f"{model.config.model_type} by onfoot"
    path = Path(model.source)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    return folder.name.removesuffix(".gguf")


def export_adapter(model: Model, path: str | Path, name: str | None = None) -> int:
    """Writes an adapter (by default the active one) as llama.cpp's LoRA file; returns the number of LoRA layers.

    llama.cpp scales each layer's B A by alpha / r, with one alpha for all; a layer of another scale has it in its B.
    """
    name = name or model.active_adapter
    if name is None or name not in model.adapters:
        raise ValueError(f"no adapter {name!r} to export; the model has: {', '.join(model.adapters) or 'none'}")
    config, adapter = model.config, model.adapters[name]
    check_config(config)
    layers = list(dict.fromkeys(lora.base_layer for lora in adapter.layers.values()))
    if HEAD in layers and config.tie_word_embeddings:
        raise ValueError(f"llama.cpp cannot adapt {HEAD}, which shares its weight with the token embedding; merge it")
    first = join(model, adapter, layers[0])[0]
    alpha = float(np.float32(first.scale * first.r)) or float(first.r)  # 0 would switch the scaling off
    tensors = []
    for layer in layers:
        lora, down, up = join(model, adapter, layer)
        factor = lora.scale * lora.r / alpha
        heads = permuted_heads(config, f"{layer}.weight")
        up = up if heads is None else permuted(up, heads)
        up = up if abs(factor - 1) < 1e-7 else up * factor
        theirs = gguf_name(f"{layer}.weight")
        tensors += [_constant(f"{theirs}.lora_a", down), _constant(f"{theirs}.lora_b", up)]
    metadata = {
        "general.architecture": architecture_of(config),
        "general.type": "adapter",
        "general.name": _name(model),
        "general.file_type": FILE_TYPES["F32"],
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    write_gguf(path, metadata, tensors)
    return len(layers)


def _constant(name: str, values: np.ndarray) -> Tensor:
    return float_tensor(name, values.shape, "F32", lambda: values)
