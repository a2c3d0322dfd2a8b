"""Hugging Face folders: config.json, model.safetensors (one file or shards), generation_config.json, tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.config import FIXED_BIASES, LAYER_TYPES, Config, GPT2Config, LlamaConfig
from onfoot.formats.files import naming, plain_name, read_json, shown
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.formats.tokenizer import Tokenizer, check_fits
from onfoot.formats.write import write_json
from onfoot.models.params import HEAD, names_of, quantizable, shapes, token_table
from onfoot.own_engine import EngineLike
from onfoot.quantized import BLOCK, HalfWeight, quantize

if TYPE_CHECKING:
    from onfoot.models.model import Model

OWN_TYPE = "onfoot-gpt2"  # the model_type of networks that transformers' GPT-2 does not support
# Constants in some files that are not parameters: GPT-2's masks, LLaMA's rotary frequencies.
CONSTANTS = re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
# Options of transformers that change a network's mathematics, each with its supported values.
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {"hidden_act": ("silu", "swish")},
    "mistral": {"hidden_act": ("silu", "swish")},
    "qwen2": {"hidden_act": ("silu", "swish")},
    "qwen3": {"hidden_act": ("silu", "swish")},
}
FLOATS = ("F64", "F32", "F16", "BF16")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPE_NAMES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16"}  # in safetensors files


def is_model_folder(folder: str | Path) -> bool:
    return (Path(folder) / "config.json").is_file()


def load_config(folder: str | Path) -> Config:
    """The configuration in a folder; raises ValueError for anything that is not supported."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not path.is_file():
        raise ValueError(f"{folder} is not a model folder: it has no config.json")
    values = read_json(path)
    model_type = values.get("model_type")
    family = "gpt2" if model_type == OWN_TYPE else model_type
    if not isinstance(family, str) or family not in SUPPORTED_VALUES:
        supported = ", ".join((*SUPPORTED_VALUES, OWN_TYPE))
        raise ValueError(f"{path}: model_type {shown(model_type)} is not supported; supported: {supported}")
    for name, allowed in SUPPORTED_VALUES[family].items():
        if values.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{path}: {name}={shown(values[name])} is not supported, only {allowed[0]!r}")
    with naming(path):
        if family == "gpt2":
            return GPT2Config.from_dict(values)
        config = LlamaConfig.from_dict(values)
        layers, alike = values.get("layer_types") or [], LAYER_TYPES[config.sliding_window is not None]
        if family in ("llama", "mistral") and layers != [alike] * len(layers):
            raise ValueError(f"layer_types {shown(layers)} are not supported, only {alike}")
        return config


class _Tensors(Mapping[str, np.ndarray]):
    """All tensors of a folder, in one file or several shards, each read on access."""

    def __init__(self, folder: Path) -> None:
        self.files = [TensorFile(path) for path in weight_files(folder)]
        self._file_of: dict[str, TensorFile] = {}
        for file in self.files:
            twice = next((tensor for tensor in file if tensor in self._file_of), None)
            if twice is not None:
                raise ValueError(
                    f"{folder}: {plain_name(twice)} is in both {self._file_of[twice].path.name} and {file.path.name}"
                )
            self._file_of |= dict.fromkeys(file, file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file_of[name][name]

    def file_of(self, name: str) -> TensorFile:
        return self._file_of[name]

    def __iter__(self) -> Any:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's tensors: model.safetensors, or the shards that an index names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        return _shards(index)
    hint = " (pytorch_model.bin can run code when it is loaded; save the model again as safetensors)"
    raise ValueError(f"{folder} has no model.safetensors{hint if (folder / 'pytorch_model.bin').exists() else ''}")


def _shards(index: Path) -> list[Path]:
    """The files named in an index; they must be in the same folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not name or name != Path(name).name or "\0" in name or len(name) > 200:
            raise ValueError(f"{index}: shard {shown(name)} is not the name of a file in the same folder")
        if not (index.parent / name).exists():
            raise ValueError(f"{index.parent}: shard {plain_name(name)} is missing")
    return [index.parent / name for name in names]


class Params(Mapping[str, Any]):
    """The parameters of a folder by full name, with or without the base model's prefix in the files.

    Names, shapes and dtypes are checked before the first read. Each tensor is read on access, so that none is in memory
    twice while a model is built.
    """

    def __init__(self, folder: str | Path, config: Config) -> None:
        self._tensors = _Tensors(Path(folder))
        prefix = names_of(config).PREFIX
        self._names: dict[str, str] = {}  # full name: name in the file
        for name in self._tensors:
            if not CONSTANTS.search(name):
                full = name if name.startswith((prefix, f"{HEAD}.")) else f"{prefix}{name}"
                if full in self._names:
                    raise ValueError(
                        f"{folder} has {plain_name(full)} twice: as {shown(self._names[full])} and as {shown(name)}"
                    )
                self._names[full] = name
        if config.n_layer > len(self._names):
            raise ValueError(
                f"{folder}: config.json expects {config.n_layer:,} layers, but there are {len(self._names):,} tensors"
            )
        head, table, expected = f"{HEAD}.weight", token_table(config), shapes(config)
        repeated = config.tie_word_embeddings and head in self._names  # some files store tied embeddings twice
        for name, shape in (expected | {head: expected[table]} if repeated else expected).items():
            self._check(folder, name, shape)
        if repeated:
            if not np.array_equal(self[head], self[table]):
                raise ValueError(f"{folder}: {head} differs from {table}, but config.json ties them")
            del self._names[head]
        unknown = sorted(set(self._names) - set(expected))
        if unknown:
            raise ValueError(f"{folder}: unexpected tensor {plain_name(unknown[0])} for the model in config.json")

    def _check(self, folder: str | Path, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ValueError(f"{folder}: tensor {name} is missing")
        file, stored = self._tensors.file_of(self._names[name]), self._names[name]
        if file.shape(stored) != shape:
            raise ValueError(f"{folder}: {name} has shape {shown(file.shape(stored))}; config.json expects {shape}")
        if file.dtype(stored) not in FLOATS:
            raise ValueError(f"{folder}: {name} has dtype {shown(file.dtype(stored))}, which is not floating-point")

    def __getitem__(self, name: str) -> Any:
        return self._tensors[self._names[name]]

    def dtype(self, name: str) -> str:
        """The dtype of a tensor in its file, by its safetensors name."""
        return self._tensors.file_of(self._names[name]).dtype(self._names[name])

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored; bfloat16 as uint16."""
        return self._tensors.file_of(self._names[name]).raw(self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tensor_summary(folder: str | Path) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of every tensor in the folder's files."""
    tensors = _Tensors(Path(folder))
    return [(name, tensors.file_of(name).shape(name), tensors.file_of(name).dtype(name)) for name in tensors]


def transformers_config(config: Config, dtype: str) -> dict[str, Any]:
    """The contents of config.json; a network that transformers' GPT-2 does not support gets its own model_type."""
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
    """The fields of transformers' LlamaConfig, MistralConfig, ..., for versions before and since 5."""
    scaling = values["rope_scaling"]
    if config.rope_scaling is not None and config.rope_scaling.rope_type != "llama3":
        scaling = {"rope_type": config.rope_scaling.rope_type, "factor": config.rope_scaling.factor}
    values |= {"hidden_act": "silu", "num_key_value_heads": config.n_kv_head, "rope_scaling": scaling}
    if config.model_type == "qwen3":
        values["head_dim"] = config.key_width  # it has a default of its own
    elif config.head_dim is None:
        del values["head_dim"]
    values["rope_parameters"] = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    for name in FIXED_BIASES[config.model_type]:
        del values[name]
    layers = [LAYER_TYPES[config.window(b) is not None] for b in range(config.n_layer)]
    if config.model_type == "llama":
        del values["sliding_window"]
    if config.model_type not in ("qwen2", "qwen3"):
        del values["layer_types"]
    else:
        full = layers.index("sliding_attention") if "sliding_attention" in layers else config.n_layer
        windows = {"use_sliding_window": config.sliding_window is not None, "max_window_layers": full}
        values |= {**windows, "layer_types": layers}
    return values


def saved_dtypes(model: Model, dtype: str | None) -> dict[str, str]:
    """The safetensors dtype to save each parameter in: `dtype`, or that of the file if the model kept it."""
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise ValueError(f"unknown dtype {shown(dtype)}; choose from {', '.join(DTYPE_NAMES)}")
    own, known = DTYPE_NAMES[dtype or model.dtype], {} if dtype else model.file_dtypes
    known = {name: kind for name, kind in known.items() if kind in ("F16", "BF16")}
    table = known.get(token_table(model.config), own)  # a head that was split from the table has no dtype of its own
    return {name: known.get(name, table if name == f"{HEAD}.weight" else own) for name in shapes(model.config)}


def save_folder(model: Model, folder: str | Path, dtype: str | None = None) -> None:
    """Saves the model as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""
    path = Path(folder)
    config = model.config
    dtypes = saved_dtypes(model, dtype)
    names = {stored: name for name, stored in DTYPE_NAMES.items()}
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", transformers_config(config, names[dtypes[token_table(config)]]))
    special = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id") if getattr(config, name) is not None
    }
    write_json(path / "generation_config.json", {"_from_model_config": True, **special})
    write_tensors(path / "model.safetensors", {name: model.params[name] for name in dtypes}, dtypes)
    if model.tokenizer is not None:
        model.tokenizer.save(path, config.n_positions)


class _QuantizedParams(Params):
    """Params whose linear weights and token embeddings are quantised to 8 bits, each when it is read."""

    def __init__(self, folder: str | Path, config: Config) -> None:
        super().__init__(folder, config)
        self._out_in = quantizable(config)
        for name, out_in in self._out_in.items():
            n_in = shapes(config)[name][1 if out_in else 0]
            if n_in % BLOCK:
                raise ValueError(f"{folder}: cannot quantise {name}: input size {n_in} is not a multiple of {BLOCK}")

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name not in self._out_in:
            return value
        return quantize(value) if self._out_in[name] else quantize(value.T).T


class _HalfParams(Params):
    """Params whose 16-bit linear weights and token embeddings stay in 16 bits."""

    def __init__(self, folder: str | Path, config: Config) -> None:
        super().__init__(folder, config)
        self._out_in = quantizable(config)

    def __getitem__(self, name: str) -> Any:
        kind = self.dtype(name)
        if name not in self._out_in or kind not in ("F16", "BF16"):
            return super().__getitem__(name)
        bits = self.raw(name).view(np.uint16)
        return HalfWeight(kind, bits) if self._out_in[name] else HalfWeight(kind, bits.T).T


def load_folder(
    folder: str | Path, dtype: str, engine: EngineLike, quantized: bool = False, half: bool = False
) -> Model:
    """The model in a folder, with its tokenizer if there is one; with `half`, 16-bit weights stay in 16 bits."""
    from onfoot.models.model import Model

    config = load_config(folder)
    params = (_QuantizedParams if quantized else _HalfParams if half else Params)(folder, config)
    model = Model(config, params, dtype, engine)
    model.file_dtypes = {name: params.dtype(name) for name in params} if half else {}
    model.source = str(Path(folder).resolve())  # absolute, because adapters store it as their base model
    model.tokenizer = Tokenizer.find(folder)
    if model.tokenizer is not None:
        check_fits(model.tokenizer, config, folder)
    return model
