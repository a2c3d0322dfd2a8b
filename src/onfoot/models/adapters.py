"""LoRA adapters on a model: which layers have one, their parameters, merging.

An adapter's parameters live in `model.params` under PEFT's names, `<layer>.lora_A.<adapter>.weight` (r, in) and
`<layer>.lora_B.<adapter>.weight` (out, r); A is the paper's dᵗ, B its uᵗ. A base model may have several adapters;
one of them is active.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import Array
from onfoot.models.params import HEAD, linear_shapes, part_columns, stored_weights, token_table
from onfoot.quantized import QuantizedWeight, frozen_weight

if TYPE_CHECKING:
    from onfoot.models.model import Model


@dataclass(frozen=True)
class LoraLayer:
    """The LoRA layer of one base layer. PEFT's scale is alpha/r, or alpha/√r with rsLoRA; the paper's is α alone."""

    base_layer: str  # the base layer that it adapts
    columns: slice | None  # the columns of that layer's output that it adds to; None: all
    r: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(frozen=True)
class Adapter:
    """A named set of LoRA layers, by the name of the base layer (or part of a layer) that each adapts."""

    name: str
    layers: dict[str, LoraLayer]

    def down(self, layer: str) -> str:
        """The name of a layer's parameter A."""
        return f"{layer}.lora_A.{self.name}.weight"

    def up(self, layer: str) -> str:
        """The name of a layer's parameter B."""
        return f"{layer}.lora_B.{self.name}.weight"

    def lora_layers(self, layer: str) -> list[str]:
        """The names of the LoRA layers of a base layer: its own name, its parts' names, or none."""
        return self._by_layer.get(layer, [])

    @cached_property
    def _by_layer(self) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {}
        for name, lora in self.layers.items():
            out.setdefault(lora.base_layer, []).append(name)
        return out

    def parameter_names(self) -> list[str]:
        return [name for layer in self.layers for name in (self.down(layer), self.up(layer))]


def match_layers(model: Model, targets: Sequence[str]) -> list[str]:
    """The layers whose name is, or ends with, one of the targets; each target must match.

    Parts of GPT-2's c_attn can be targets too: c_attn.q, c_attn.k and c_attn.v each get their own LoRA layer.
    """
    layers = list(linear_shapes(model.config))
    parts_of = {name: list(part_columns(model.config, name)) for name in layers}
    names = [*layers, *(part for parts in parts_of.values() for part in parts)]
    found: list[str] = []
    for target in targets:
        matched = [name for name in names if name == target or name.endswith(f".{target}")]
        if not matched:
            endings = sorted({name.rsplit(".", 1)[-1] for name in layers})
            endings += sorted({".".join(part.rsplit(".", 2)[-2:]) for parts in parts_of.values() for part in parts})
            raise ValueError(f"no layer matches {target!r}; choose from {', '.join(endings)}")
        found += [name for name in matched if name not in found]
    for name in found:
        parts = [part for part in parts_of.get(name, ()) if part in found]
        if parts:
            raise ValueError(f"{name} and its part {parts[0]} cannot both have a LoRA layer; choose one")
    return sorted(found, key=names.index)


def place(model: Model, layer: str) -> tuple[str, slice | None, int, int]:
    """The base layer of a LoRA layer of that name, its columns there, and its in and out features."""
    known = linear_shapes(model.config)
    if layer in known:
        return layer, None, *known[layer]
    base = layer.rpartition(".")[0]
    columns = part_columns(model.config, base).get(layer) if base in known else None
    if columns is None:
        raise ValueError(f"this model has no layer {layer!r}")
    return base, columns, known[base][0], columns.stop - columns.start


def new_adapter(
    model: Model,
    r: int,
    alpha: float,
    targets: Sequence[str],
    dropout: float,
    use_rslora: bool,
    name: str,
    seed: int,
) -> None:
    """Adds an adapter with PEFT's initial values: A uniform in ±1/√in, B = 0, so that the output is unchanged."""
    if isinstance(targets, str) or not targets:
        raise ValueError(f"targets must be a list of layer names such as ['c_attn', 'c_proj'], got {targets!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a finite number > 0, got {alpha!r}")
    layers = match_layers(model, targets)
    adapter = Adapter(name, {})
    values = {}
    rng = np.random.default_rng([seed, len(model.adapters)])
    for layer in layers:
        beside, columns, n_in, n_out = place(model, layer)
        if isinstance(r, bool) or not isinstance(r, int) or not 1 <= r <= min(n_in, n_out):
            raise ValueError(f"r must be in 1 ... {min(n_in, n_out)} for {layer} ({n_in} × {n_out}), got {r!r}")
        adapter.layers[layer] = LoraLayer(beside, columns, r, alpha, dropout, use_rslora)
        values[adapter.down(layer)] = rng.uniform(-1 / math.sqrt(n_in), 1 / math.sqrt(n_in), (r, n_in))
        values[adapter.up(layer)] = np.zeros((n_out, r))
    install(model, adapter, values)


def install(model: Model, adapter: Adapter, values: dict[str, np.ndarray]) -> None:
    """Adds an adapter and its parameters to the model, and makes it the active one."""
    if adapter.name in model.adapters:
        raise ValueError(f"the model already has an adapter {adapter.name!r}; choose another name")
    if not adapter.name or "." in adapter.name:
        raise ValueError(f"an adapter name must not be empty or contain a dot, got {adapter.name!r}")
    if model.merged is not None:
        raise ValueError(f"the adapter {model.merged!r} is merged into the weights; unmerge_adapter() first")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, lora in adapter.layers.items():
        _, _, n_in, n_out = place(model, layer)
        shapes |= {adapter.down(layer): (lora.r, n_in), adapter.up(layer): (n_out, lora.r)}
    for parameter, shape in shapes.items():
        if np.shape(values[parameter]) != shape:
            raise ValueError(f"{parameter} has shape {np.shape(values[parameter])}; its layer expects {shape}")
    model.params.shapes |= shapes
    for parameter in shapes:
        model.params.copy_in(parameter, values[parameter])
    model.adapters[adapter.name] = adapter
    activate(model, adapter.name)


def activate(model: Model, name: str | None) -> None:
    """Activates one adapter: it trains and the base is frozen. None deactivates all, and the base trains again."""
    if name is not None and name not in model.adapters:
        known = ", ".join(model.adapters) or "none"
        raise ValueError(f"the model has no adapter {name!r}; available: {known}")
    if model.merged is not None:
        raise ValueError(f"the adapter {model.merged!r} is merged into the weights; unmerge_adapter() first")
    model.active_adapter = name
    adapter_names = {n for adapter in model.adapters.values() for n in adapter.parameter_names()}
    model.trainable = set(model.params) - adapter_names - model.quantized
    if name is not None:
        model.trainable = set(model.adapters[name].parameter_names())


def merge(model: Model) -> None:
    """Merges the active adapter into the base weights, w + scale d u; it then has no cost."""
    if model.active_adapter is None:
        raise ValueError("no adapter is active; there is nothing to merge")
    adapter = model.adapters[model.active_adapter]
    _widen(model, adapter)
    if HEAD in adapter.layers and model.config.tie_word_embeddings:
        # the token table must not change: the head gets its own weight
        model.config = replace(model.config, tie_word_embeddings=False)
        table = model.params[token_table(model.config)]
        model.params.shapes[f"{HEAD}.weight"] = tuple(table.shape)
        model.params.copy_in(f"{HEAD}.weight", table)
        model.tied_before_merge = True
    _add(model, adapter, 1.0)
    activate(model, None)
    model.merged = adapter.name


def _widen(model: Model, adapter: Adapter) -> None:
    """Converts the 16-bit weights that the adapter changes to floats; a ValueError if one is in quantised blocks."""
    weights = {name: frozen_weight(model.params[name]) for name, _ in stored_weights(model.config).values()}
    if any(isinstance(weight, QuantizedWeight) for weight in weights.values()):
        raise ValueError("cannot merge an adapter into quantised weights; load the base without quantized=True")
    for lora in adapter.layers.values():
        tensor = stored_weights(model.config)[lora.base_layer].tensor
        if tensor in model.quantized:
            model.params.copy_in(tensor, np.asarray(model.params[tensor]))


def unmerge(model: Model) -> None:
    """Removes a merged adapter from the weights, and makes it active."""
    if model.merged is None:
        raise ValueError("no adapter is merged")
    adapter = model.adapters[model.merged]
    _add(model, adapter, -1.0)
    if model.tied_before_merge:
        model.params.remove(f"{HEAD}.weight")
        model.config = replace(model.config, tie_word_embeddings=True)
        model.tied_before_merge = False
    model.merged = None
    activate(model, adapter.name)


def delta(model: Model, adapter: Adapter, layer: str) -> Array:
    """scale d u, (in, out): what a LoRA layer adds to the weight of its base layer."""
    down, up = model.params[adapter.down(layer)], model.params[adapter.up(layer)]
    return adapter.layers[layer].scale * (down.T @ up.T)


def _add(model: Model, adapter: Adapter, sign: float) -> None:
    for layer, lora in adapter.layers.items():
        tensor, out_in = stored_weights(model.config)[lora.base_layer]
        weight = model.params[tensor].T if out_in else model.params[tensor]  # (in, out), a view
        weight[:, lora.columns or slice(None)] += sign * delta(model, adapter, layer)
