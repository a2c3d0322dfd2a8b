"""PEFT adapters in and out: adapter_config.json and adapter_model.safetensors.

What PEFT can do and this cannot is refused by name, never ignored: an option that is not known here must have the value
that means "off".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.config import LARGEST, LARGEST_FLOAT
from onfoot.formats.files import naming, plain_name, read_json, shown
from onfoot.formats.huggingface import FLOATS, write_json
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.models.adapters import Adapter, LoraLayer, install, place
from onfoot.models.params import HEAD, linear_shapes, names_of, part_columns, stored_weights

if TYPE_CHECKING:
    from onfoot.models.model import Model

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMES = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight$")
BASE = re.compile(r"\.base_layer\.(weight|bias)$")  # PEFT saves a tied head's own weight beside its adapter

# Options that say how an adapter was made, or that its tensors' names say again: whatever their value, nothing changes.
NEUTRAL = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "ensure_weight_tying", "runtime_config", "eva_config",
}  # fmt: skip
HONOURED = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"}
# What PEFT takes for options that a file leaves out.
DEFAULTS = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False}
MOST_PATTERNS = 4096
QUANTIFIER = re.compile(r"[*+?{]")
QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")
SAME_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # initial values that leave the base as it was


def is_adapter_folder(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: str | Path) -> str | None:
    """The base model that an adapter says it belongs to."""
    return read_json(Path(folder) / CONFIG).get("base_model_name_or_path")


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json with PEFT's defaults for what it leaves out, or a ValueError that names what is wrong."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} is not an adapter: it has no {CONFIG}")
    values = DEFAULTS | read_json(path)
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {shown(values.get('peft_type'))} is not supported, only 'LORA'")
    if values.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={shown(values['bias'])} is not supported, only 'none'")
    if values.get("init_lora_weights", True) not in SAME_BASE:
        raise ValueError(
            f"{path}: init_lora_weights={shown(values['init_lora_weights'])} is not supported: it changes the base"
        )
    for name, value in values.items():
        if value and name not in NEUTRAL | HONOURED | {"bias", "init_lora_weights"}:
            raise ValueError(f"{path}: {shown(name)[1:-1]}={shown(value)} is not supported")
    with naming(path):
        _check_rank("r", values["r"])
        _check_alpha("lora_alpha", values["lora_alpha"])
        dropout = values["lora_dropout"] = 0.0 if values["lora_dropout"] is None else values["lora_dropout"]
        if type(dropout) not in (int, float) or not 0 <= dropout < 1:
            raise ValueError(f"lora_dropout={shown(dropout)} is not in [0, 1)")
        if values["use_rslora"] not in (True, False, None):
            raise ValueError(f"use_rslora={shown(values['use_rslora'])}: true or false is needed")
        values["rank_pattern"] = _patterns(values, "rank_pattern", _check_rank)
        values["alpha_pattern"] = _patterns(values, "alpha_pattern", _check_alpha)
    return values


def _check_rank(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{name}={shown(value)}: a whole number of at least 1 is needed")


def _check_alpha(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value <= LARGEST_FLOAT:
        raise ValueError(f"{name}={shown(value)}: a finite number above 0 is needed")


def _patterns(
    values: dict[str, Any], name: str, check: Callable[[str, Any], None]
) -> list[tuple[re.Pattern[str], Any]]:
    """PEFT's patterns: a value for the layers whose name is, or ends with what matches, a key; the first counts.

    A key is a regular expression of others. One with quantifiers inside one another could take for ever.
    """
    found = values.get(name) or {}
    if not isinstance(found, dict) or len(found) > MOST_PATTERNS:
        raise ValueError(f"{name}={shown(found)}: an object with at most {MOST_PATTERNS:,} entries is needed")
    out = []
    for key, value in found.items():
        check(f"{name}[{shown(key)}]", value)
        if len(QUANTIFIER.findall(key)) > 3 or QUANTIFIED_GROUP.search(key) or len(key) > 1000:
            raise ValueError(f"{name}: the pattern {shown(key)} is too intricate")
        try:
            out.append((re.compile(rf"(.*\.)?({key})$"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{name}: the pattern {shown(key)} is not a regular expression ({error})") from None
    return out


def _value_for(layer: str, patterns: list[tuple[re.Pattern[str], Any]], default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(layer)), default)


def load_adapter(model: Model, folder: Path, name: str) -> None:
    """Puts an adapter's tensors on a model; the first that does not fit is named."""
    config = read_config(folder)
    path = folder / TENSORS
    if not path.exists():
        raise ValueError(f"{folder} has no {TENSORS}")
    tensors = TensorFile(path)
    sides: dict[str, dict[str, str]] = {}  # layer: {side: tensor}
    for tensor in tensors:
        if BASE.search(tensor):
            _check_same_head(model, tensors, tensor, folder)
            continue
        match = NAMES.match(tensor.removeprefix(PREFIX))
        if match is None:
            raise ValueError(f"{path}: the tensor {plain_name(tensor)} is not one of a LoRA adapter's")
        pair = sides.setdefault(_full_name(model, match["layer"]), {})
        if match["side"] in pair:
            raise ValueError(f"{path} has {shown(pair[match['side']])} and {plain_name(tensor)} for the same layer")
        pair[match["side"]] = tensor
    if not sides:
        raise ValueError(f"{path} holds no LoRA tensors")
    adapter, values = Adapter(name, {}), {}
    known = linear_shapes(model.config)
    for layer, pair in sides.items():
        if layer not in known:
            raise ValueError(
                f"{folder} does not belong to this model: it has a LoRA layer for {plain_name(layer)}, "
                f"which the model does not have"
            )
        r = _value_for(layer, config["rank_pattern"], config["r"])
        n_in, n_out = known[layer]
        for side, shape in (("A", (r, n_in)), ("B", (n_out, r))):
            if side not in pair:
                raise ValueError(f"{path}: the tensor {layer}.lora_{side}.weight is missing")
            if tensors.shape(pair[side]) != shape:
                raise ValueError(
                    f"{folder} does not belong to this model: {layer}.lora_{side}.weight has shape "
                    f"{shown(tensors.shape(pair[side]))}; this model and rank {r} ask for {shape}"
                )
            if tensors.dtype(pair[side]) not in FLOATS:
                raise ValueError(
                    f"{path}: {plain_name(pair[side])} holds {shown(tensors.dtype(pair[side]))}, not floats"
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
    """Fills the active adapter with what `save_adapter` wrote of it, LoRA layer by LoRA layer: `_joined` undone."""
    assert model.active_adapter is not None
    adapter, tensors = model.adapters[model.active_adapter], TensorFile(folder / TENSORS)
    for layer in dict.fromkeys(lora.beside for lora in adapter.layers.values()):
        down, up = (_saved(tensors, f"{PREFIX}{layer}.lora_{side}.weight") for side in "AB")
        r = sum(adapter.layers[name].r for name in adapter.lora_layers(layer))
        n_in, n_out = linear_shapes(model.config)[layer]
        if (down.shape, up.shape) != ((r, n_in), (n_out, r)):
            raise ValueError(
                f"{tensors.path}: {layer} has A {down.shape} and B {up.shape}; "
                f"this run asks for {(r, n_in)} and {(n_out, r)}"
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
                f"{folder}: {layer}.lora_A.weight has {down.shape[0]} rows; the ranks of this adapter ask for {row}"
            )


def save_adapter(model: Model, folder: str | Path, name: str | None = None) -> None:
    """Writes one adapter. Companions of parts of a layer are written as one of the whole layer, which PEFT knows."""
    name = name or model.active_adapter or model.merged
    if name is None or name not in model.adapters:
        known = ", ".join(model.adapters) or "none"
        raise ValueError(f"there is no adapter {name!r} to save; the model has: {known}")
    adapter = model.adapters[name]
    whole: dict[str, tuple[LoraLayer, np.ndarray, np.ndarray]] = {}
    for layer in dict.fromkeys(lora.beside for lora in adapter.layers.values()):
        whole[layer] = _joined(model, adapter, layer)
    first = next(iter(whole.values()))[0]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, (_, down, up) in whole.items():
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
            # GPT-2's own layers are stored (in, out), its head is not; PEFT sees to each by itself where both occur
            "fan_in_fan_out": not any(stored_weights(model.config)[layer].out_in for layer in whole),
            "target_modules": sorted(whole),
            "rank_pattern": {layer: c.r for layer, (c, _, _) in whole.items() if c.r != first.r},
            "alpha_pattern": {layer: c.alpha for layer, (c, _, _) in whole.items() if c.alpha != first.alpha},
        },
    )


def _saved(tensors: TensorFile, name: str) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{tensors.path}: the tensor {name} is missing")
    return tensors[name]


def _check_same_head(model: Model, tensors: TensorFile, tensor: str, folder: Path) -> None:
    """An adapter of a tied head comes with the head's own weight; it must be this model's."""
    own = to_numpy(model.params[stored_weights(model.config)[HEAD].tensor])
    fits = f"{HEAD}.base_layer.weight" in tensor and own.shape == tensors.shape(tensor)
    if not fits or tensors.dtype(tensor) not in FLOATS or not np.allclose(own, tensors[tensor], atol=1e-6):
        raise ValueError(
            f"{folder} does not belong to this model: its tensor {plain_name(tensor)} is not the model's own"
        )


def _joined(model: Model, adapter: Adapter, layer: str) -> tuple[LoraLayer, np.ndarray, np.ndarray]:
    """The LoRA layers of a layer as one: the parts' A one below the other, their B in blocks, the rank their sum."""
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
