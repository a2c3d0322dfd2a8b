"""Hugging Face folders: config.json, model.safetensors (whole or in shards), generation_config.json, the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.config import Config, GPT2Config, LlamaConfig
from onfoot.formats.tensors import TensorFile, replaced, write_tensors
from onfoot.formats.tokenizer import Tokenizer
from onfoot.models.params import HEAD, Once, names_of, quantizable, shapes, token_table
from onfoot.quantized import quantize

if TYPE_CHECKING:
    from onfoot.models.model import Model

OWN_TYPE = "onfoot-gpt2"  # the model_type of a network that transformers' GPT-2 cannot be
# constants that some files carry: GPT-2's masks, LLaMA's rotary frequencies
CONSTANTS = re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
# Options of transformers that change a network's mathematics, and the values of each that are supported.
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu", "swish")},
    "qwen2": {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def is_model_folder(folder: str | Path) -> bool:
    return (Path(folder) / "config.json").is_file()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ValueError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def load_config(folder: str | Path) -> Config:
    """The configuration of a folder; what is not supported is refused by name."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not path.is_file():
        raise ValueError(f"{folder} is not a model: it has no config.json")
    values = read_json(path)
    kind = values.get("model_type")
    family = "gpt2" if kind == OWN_TYPE else kind
    if family not in FIXED:
        raise ValueError(f"{path}: model_type {kind!r} is not supported; known are {', '.join(FIXED)}, {OWN_TYPE}")
    for name, allowed in FIXED[family].items():
        if values.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{path}: {name}={values[name]!r} is not supported, only {allowed[0]!r}")
    if family == "gpt2":
        return GPT2Config.from_dict(values)
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{path}: layer_types {sorted(set(values['layer_types']))} are not supported")
    try:
        return LlamaConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class _Tensors(Mapping[str, np.ndarray]):
    """All tensors of a folder, over one file or many shards, read when asked for."""

    def __init__(self, folder: Path) -> None:
        index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if whole.is_file():
            names = [whole]
        elif index.is_file():
            names = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
            missing = [str(name) for name in names if not name.is_file()]
            if missing:
                raise ValueError(f"{folder}: the shard {missing[0]} is missing")
        else:
            hint = " (pytorch_model.bin can run code when it is read; save it again as safetensors)"
            raise ValueError(
                f"{folder} has no model.safetensors{hint if (folder / 'pytorch_model.bin').exists() else ''}"
            )
        self.files = [TensorFile(name) for name in names]
        self._where = {tensor: file for file in self.files for tensor in file}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._where[name][name]

    def file_of(self, name: str) -> TensorFile:
        return self._where[name]

    def __iter__(self) -> Any:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def load_params(folder: str | Path, config: Config) -> dict[str, np.ndarray]:
    """The parameters under their full names, whichever of the two naming styles the file has."""
    found: dict[str, np.ndarray] = {}
    tensors = _Tensors(Path(folder))
    prefix, table = names_of(config).PREFIX, token_table(config)
    for name in tensors:
        if CONSTANTS.search(name):
            continue
        full = name if name.startswith((prefix, f"{HEAD}.")) else f"{prefix}{name}"
        found[full] = tensors[name]
    head = f"{HEAD}.weight"
    if config.tie_word_embeddings and head in found:  # some files hold the tied table twice
        if not np.array_equal(found[head], found.get(table, ())):
            raise ValueError(f"{folder}: {head} differs from {table}, yet config.json says they are tied")
        del found[head]
    for name, shape in shapes(config).items():
        if name not in found:
            raise ValueError(f"{folder}: the tensor {name} is missing")
        if found[name].shape != shape:
            raise ValueError(f"{folder}: {name} has shape {found[name].shape}; config.json asks for {shape}")
        if found[name].dtype.kind != "f":
            raise ValueError(f"{folder}: {name} holds {found[name].dtype}, not floating-point numbers")
    return found


def tensor_summary(folder: str | Path) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of every tensor in the folder's files."""
    tensors = _Tensors(Path(folder))
    return [(name, tensors.file_of(name).shape(name), tensors.file_of(name).dtype(name)) for name in tensors]


def transformers_config(config: Config, dtype: str) -> dict[str, Any]:
    """config.json's contents. A network that transformers' GPT-2 cannot be gets a model_type of its own."""
    values = config.to_dict()
    if isinstance(config, LlamaConfig):
        return {"architectures": [ARCHITECTURES[config.model_type]], **_llama_values(config, values), "dtype": dtype}
    plain = config.causal and not config.lm_head_bias and config.key_width == config.value_width == (
        config.n_embd / config.n_head
    )  # fmt: skip
    if plain:
        for name in ("lm_head_bias", "head_dim", "qk_head_dim", "causal"):
            del values[name]
        return {"architectures": ["GPT2LMHeadModel"], **values, "dtype": dtype}
    return {**values, "model_type": OWN_TYPE, "dtype": dtype}


def _llama_values(config: LlamaConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The fields as transformers' own LlamaConfig and Qwen2Config have them, before and since version 5."""
    scaling = values["rope_scaling"]
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "linear":
        scaling = {"rope_type": "linear", "factor": config.rope_scaling.factor}
    values |= {"hidden_act": "silu", "num_key_value_heads": config.n_kv_head, "rope_scaling": scaling}
    if config.head_dim is None:
        del values["head_dim"]
    values["rope_parameters"] = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    if config.model_type == "qwen2":
        del values["attention_bias"], values["mlp_bias"]
        values["use_sliding_window"] = False
    return values


def save_folder(model: Model, folder: str | Path) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` load as it is."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = model.config
    write_json(path / "config.json", transformers_config(config, model.dtype))
    special = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id") if getattr(config, name) is not None
    }
    write_json(path / "generation_config.json", {"_from_model_config": True, **special})
    write_tensors(path / "model.safetensors", {name: to_numpy(model.params[name]) for name in shapes(config)})
    if model.tokenizer is not None:
        model.tokenizer.save(path, config.n_positions)


class _Rounded(Once):
    """The same, with linear weights and the token table in blocks of 8 bits, each rounded as it is read."""

    def __init__(self, found: dict[str, np.ndarray], config: Config) -> None:
        super().__init__(found)
        self._out_in = quantizable(config)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name not in self._out_in:
            return value
        return quantize(value) if self._out_in[name] else quantize(value.T).T


def load_folder(folder: str | Path, dtype: str, engine: str, quantized: bool = False) -> Model:
    """The model in a folder, its tokenizer beside it where there is one."""
    from onfoot.models.model import Model

    config = load_config(folder)
    once = _Rounded(load_params(folder, config), config) if quantized else Once(load_params(folder, config))
    model = Model(config, once, dtype, engine)
    model.source = str(Path(folder).resolve())  # an adapter made on it must find it from anywhere
    model.tokenizer = Tokenizer.find(folder)
    if model.tokenizer is not None and model.tokenizer.size > config.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {model.tokenizer.size} tokens, the model vocab_size={config.vocab_size}; "
            f"they do not belong together"
        )
    return model


def write_json(path: Path, values: dict[str, Any]) -> None:
    with replaced(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
