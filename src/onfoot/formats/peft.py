"""Loads and saves PEFT adapters: adapter_config.json and adapter_model.safetensors.

PEFT options that are not supported raise an error and are never ignored, unless their value means "off".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.config import LARGEST_FLOAT, MAX_SIZE
from onfoot.formats.files import naming, plain_name, read_json, shown
from onfoot.formats.huggingface import FLOATS, is_model_folder
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.formats.write import atomic_write, write_json
from onfoot.models.adapters import Adapter, LoraLayer, install, place
from onfoot.models.params import HEAD, linear_shapes, names_of, part_columns, stored_weights

if TYPE_CHECKING:
    from onfoot.models.model import Model

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja",
)  # fmt: skip
PREFIX = "base_model.model."
LORA_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight$")
BASE_TENSOR = re.compile(r"\.base_layer\.(weight|bias)$")  # PEFT saves the weight of an adapted tied head too

# Options without effect on a trained adapter: how it was made, or what its tensor names already tell.
IGNORED_OPTIONS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "ensure_weight_tying", "runtime_config", "eva_config",
}  # fmt: skip
SUPPORTED_OPTIONS = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"}
# PEFT's defaults for options that a file leaves out.
DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}
MAX_PATTERNS = 4096
QUANTIFIER = re.compile(r"[*+?{]")
QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")
SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # those that leave the base weights unchanged


def is_adapter_folder(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: str | Path) -> str | None:
    """The base model named in an adapter's configuration."""
    return read_json(Path(folder) / CONFIG).get("base_model_name_or_path")


def read_config(folder: Path) -> dict[str, Any]:
    """The checked contents of adapter_config.json, with PEFT's defaults for missing options."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} is not an adapter folder: it has no {CONFIG}")
    values = DEFAULTS | read_json(path)
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {shown(values.get('peft_type'))} is not supported, only 'LORA'")
    if values.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={shown(values['bias'])} is not supported, only 'none'")
    if values.get("init_lora_weights", True) not in SUPPORTED_INITS:
        raise ValueError(
            f"{path}: init_lora_weights={shown(values['init_lora_weights'])} is not supported: "
            f"it changes the base weights"
        )
    if values.get("use_dora"):
        raise ValueError(
            f"{path}: use_dora={shown(values['use_dora'])} is not supported: it scales the columns of the weights; "
            f"merge the adapter with PEFT (merge_and_unload, save_pretrained), and load the merged model"
        )
    for name, value in values.items():
        if value and name not in IGNORED_OPTIONS | SUPPORTED_OPTIONS | {"bias", "init_lora_weights"}:
            raise ValueError(f"{path}: {shown(name)[1:-1]}={shown(value)} is not supported")
    with naming(path):
        _check_rank("r", values["r"])
        _check_alpha("lora_alpha", values["lora_alpha"])
        dropout = values["lora_dropout"] = 0.0 if values["lora_dropout"] is None else values["lora_dropout"]
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise ValueError(f"lora_dropout must be in [0, 1), got {shown(dropout)}")
        if values["use_rslora"] not in (True, False, None):
            raise ValueError(f"use_rslora must be true or false, got {shown(values['use_rslora'])}")
        values["rank_pattern"] = _patterns(values, "rank_pattern", _check_rank)
        values["alpha_pattern"] = _patterns(values, "alpha_pattern", _check_alpha)
    return values


def _check_rank(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise ValueError(f"{name} must be an integer from 1 to {MAX_SIZE}, got {shown(value)}")


def _check_alpha(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value <= LARGEST_FLOAT:
        raise ValueError(f"{name} must be a finite number > 0, got {shown(value)}")


def _patterns(
    values: dict[str, Any], name: str, check: Callable[[str, Any], None]
) -> list[tuple[re.Pattern[str], Any]]:
    """The compiled rank_pattern or alpha_pattern: values by regular expression; the first that matches a layer counts.

    A pattern must match the full layer name or its end. Nested quantifiers are rejected: matching could take forever.
    """
    patterns = values.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ValueError(f"{name} must be an object with at most {MAX_PATTERNS:,} entries, got {shown(patterns)}")
    out = []
    for key, value in patterns.items():
        check(f"{name}[{shown(key)}]", value)
        if len(QUANTIFIER.findall(key)) > 3 or QUANTIFIED_GROUP.search(key) or len(key) > 1000:
            raise ValueError(f"{name}: pattern {shown(key)} is too complex")
        try:
            out.append((re.compile(rf"(.*\.)?({key})$"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}: pattern {shown(key)} is not a valid regular expression ({error})") from None
    return out


def _value_for(layer: str, patterns: list[tuple[re.Pattern[str], Any]], default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(layer)), default)


def load_adapter(model: Model, folder: Path, name: str) -> None:
    """Loads an adapter into a model; raises ValueError for the first tensor that does not fit."""
    config = read_config(folder)
    path = folder / TENSORS
    if not path.exists():
        raise ValueError(f"{folder} has no {TENSORS}")
    tensors = TensorFile(path)
    sides: dict[str, dict[str, str]] = {}  # layer: {side: tensor}
    for tensor in tensors:
        if BASE_TENSOR.search(tensor):
            _check_same_head(model, tensors, tensor, folder)
            continue
        match = LORA_TENSOR.match(tensor.removeprefix(PREFIX))
        if match is None:
            raise ValueError(f"{path}: tensor {plain_name(tensor)} is not a LoRA tensor")
        pair = sides.setdefault(_full_name(model, match["layer"]), {})
        if match["side"] in pair:
            raise ValueError(
                f"{path} has both {shown(pair[match['side']])} and {plain_name(tensor)} for the same layer"
            )
        pair[match["side"]] = tensor
    if not sides:
        raise ValueError(f"{path} contains no LoRA tensors")
    adapter, values = Adapter(name, {}), {}
    known = linear_shapes(model.config)
    for layer, pair in sides.items():
        if layer not in known:
            raise ValueError(
                f"{folder} does not fit this model: it has a LoRA layer for {plain_name(layer)}, "
                f"which the model does not have"
            )
        r = _value_for(layer, config["rank_pattern"], config["r"])
        n_in, n_out = known[layer]
        for side, shape in (("A", (r, n_in)), ("B", (n_out, r))):
            if side not in pair:
                raise ValueError(f"{path}: tensor {layer}.lora_{side}.weight is missing")
            if tensors.shape(pair[side]) != shape:
                raise ValueError(
                    f"{folder} does not fit this model: {layer}.lora_{side}.weight has shape "
                    f"{shown(tensors.shape(pair[side]))}; this model and rank {r} expect {shape}"
                )
            if tensors.dtype(pair[side]) not in FLOATS:
                raise ValueError(
                    f"{path}: {plain_name(pair[side])} has dtype {shown(tensors.dtype(pair[side]))}, "
                    f"which is not floating-point"
                )
        adapter.layers[layer] = LoraLayer(
            layer,
            None,
            r,
            float(_value_for(layer, config["alpha_pattern"], config["lora_alpha"])),
            float(config["lora_dropout"]),
            bool(config["use_rslora"]),
        )
        values[adapter.down(layer)], values[adapter.up(layer)] = tensors[pair["A"]], tensors[pair["B"]]
    install(model, adapter, values)


def restore_adapter(model: Model, folder: Path) -> None:
    """Restores the active adapter from the files of `save_adapter`, splitting what `join` joined."""
    assert model.active_adapter is not None
    adapter, tensors = model.adapters[model.active_adapter], TensorFile(folder / TENSORS)
    for layer in dict.fromkeys(lora.base_layer for lora in adapter.layers.values()):
        down, up = (_tensor(tensors, f"{PREFIX}{layer}.lora_{side}.weight") for side in "AB")
        r = sum(adapter.layers[name].r for name in adapter.lora_layers(layer))
        n_in, n_out = linear_shapes(model.config)[layer]
        if (down.shape, up.shape) != ((r, n_in), (n_out, r)):
            raise ValueError(
                f"{tensors.path}: {layer} has A {down.shape} and B {up.shape}; "
                f"this run expects {(r, n_in)} and {(n_out, r)}"
            )
        row = 0
        for name in adapter.lora_layers(layer):
            lora = adapter.layers[name]
            part = slice(row, row + lora.r)
            model.params[adapter.down(name)] = model.engine.floats(down[part].copy(), model.dtype)
            block = up[lora.columns or slice(None), part].copy()
            model.params[adapter.up(name)] = model.engine.floats(block, model.dtype)
            row = part.stop
        if row != down.shape[0]:
            raise ValueError(
                f"{folder}: {layer}.lora_A.weight has {down.shape[0]} rows; the ranks of this adapter add up to {row}"
            )


def save_adapter(model: Model, folder: str | Path, name: str | None = None) -> None:
    """Saves one adapter. LoRA layers for parts of a layer are joined into one for the full layer, as PEFT requires."""
    name = name or model.active_adapter or model.merged
    if name is None or name not in model.adapters:
        known = ", ".join(model.adapters) or "none"
        raise ValueError(f"no adapter {name!r} to save; the model has: {known}")
    adapter = model.adapters[name]
    joined: dict[str, tuple[LoraLayer, np.ndarray, np.ndarray]] = {}
    for layer in dict.fromkeys(lora.base_layer for lora in adapter.layers.values()):
        joined[layer] = join(model, adapter, layer)
    first = next(iter(joined.values()))[0]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, (_, down, up) in joined.items():
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = down
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = up
    write_tensors(path / TENSORS, tensors)
    write_json(
        path / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.source,
            "inference_mode": True,
            "r": first.r,
            "lora_alpha": first.alpha,
            "lora_dropout": first.dropout,
            "use_rslora": first.use_rslora,
            "bias": "none",
            "init_lora_weights": True,
            # GPT-2's blocks are stored (in, out), its head is not; PEFT corrects this per layer if both occur
            "fan_in_fan_out": not any(stored_weights(model.config)[layer].out_in for layer in joined),
            "target_modules": sorted(joined),
            "rank_pattern": {layer: lora.r for layer, (lora, _, _) in joined.items() if lora.r != first.r},
            "alpha_pattern": {layer: lora.alpha for layer, (lora, _, _) in joined.items() if lora.alpha != first.alpha},
        },
    )
    if not is_model_folder(path):  # an adapter in its base's folder has the tokenizer there
        _save_tokenizer(model, path)


def _save_tokenizer(model: Model, folder: Path) -> None:
    """Copies the tokenizer's files from the base's folder; writes them if the tokenizer is not from there."""
    if model.tokenizer is None:
        return
    source = Path(model.source or "")
    if Path(model.tokenizer.name).resolve().parent != source:
        model.tokenizer.save(folder, model.config.n_positions)
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            with atomic_write(folder / name) as file:
                file.write((source / name).read_bytes())


def _tensor(tensors: TensorFile, name: str) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{tensors.path}: tensor {name} is missing")
    return tensors[name]


def _check_same_head(model: Model, tensors: TensorFile, tensor: str, folder: Path) -> None:
    """Raises ValueError unless the head's weight saved with an adapter of a tied head is this model's."""
    own = to_numpy(model.params[stored_weights(model.config)[HEAD].tensor])
    fits = f"{HEAD}.base_layer.weight" in tensor and own.shape == tensors.shape(tensor)
    if not fits or tensors.dtype(tensor) not in FLOATS or not np.allclose(own, tensors[tensor], atol=1e-6):
        raise ValueError(f"{folder} does not fit this model: its tensor {plain_name(tensor)} differs from the model's")


def join(model: Model, adapter: Adapter, layer: str) -> tuple[LoraLayer, np.ndarray, np.ndarray]:
    """The LoRA layers of one layer joined: A stacked by rows, B block by block, the rank their sum."""
    names = adapter.lora_layers(layer)
    downs = [to_numpy(model.params[adapter.down(n)]) for n in names]
    ups = [to_numpy(model.params[adapter.up(n)]) for n in names]
    first = adapter.layers[names[0]]
    if names == [layer]:
        return first, downs[0], ups[0]
    r = sum(len(d) for d in downs)
    up = np.zeros((place(model, layer)[3], r), dtype=ups[0].dtype)
    column = 0
    for n, part in zip(names, ups, strict=True):
        up[part_columns(model.config, layer)[n], column : column + part.shape[1]] = part
        column += part.shape[1]
    alpha = first.scale * (r**0.5 if first.use_rslora else r)  # the same scale at the larger rank
    return LoraLayer(layer, None, r, alpha, first.dropout, first.use_rslora), np.concatenate(downs), up


def _full_name(model: Model, layer: str) -> str:
    prefix = names_of(model.config).PREFIX
    return layer if layer == HEAD or layer.startswith(prefix) else f"{prefix}{layer}"
