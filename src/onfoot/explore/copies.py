"""Copies of a model that can be trained without changing the study; frozen weights are shared, not copied."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore.wide import Widened
from onfoot.models.model import Model
from onfoot.models.params import stored_weights
from onfoot.models.store import Params
from onfoot.quantized import FrozenWeight, Quantized, Transposed, frozen_weight

if TYPE_CHECKING:
    from onfoot.models.adapters import Adapter

LORA_RANK, LORA_ALPHA = 4, 8.0  # of the training of a large model


def copy_of(model: Model) -> Model:
    """A copy of the model. Its frozen weights are those of the model, because nothing writes into them."""
    if not model.quantized:
        return Model(model.config, model.params, model.dtype, model.engine)
    clone = copy.copy(model)
    params = Params(model.engine, model.dtype, model.params.shapes)
    for name, value in model.params.items():
        params[name] = value if isinstance(value, Quantized) else value.copy()
    clone._params, clone.adapters, clone.active_adapter = params, {}, None
    return clone


class LowRank(Widened):
    """A frozen weight (out, in) plus the product of a LoRA layer's matrices."""

    def __init__(self, base: FrozenWeight, up: np.ndarray, down: np.ndarray, scale: float) -> None:
        super().__init__(base)
        self.up, self.down, self.scale = up, down, scale  # (out, r), (r, in)

    def floats(self, rows: Any, dtype: Any = np.float64) -> np.ndarray:
        return super().floats(rows) + self.scale * (self.up[rows] @ self.down)  # eq LORA.1


def merged(start: Model, trained: Model) -> Model:
    """`start` with the LoRA layers of `trained` added to its frozen weights; these are not copied."""
    model, adapter = copy_of(start), active(trained)
    stored = stored_weights(start.config)
    for layer, lora in adapter.layers.items():
        name = stored[lora.base_layer].tensor
        value = model.params[name]
        base = frozen_weight(value)
        assert base is not None
        down, up = (trained.params[part].copy() for part in (adapter.down(layer), adapter.up(layer)))
        moved = LowRank(base, up, down, lora.scale)
        model.params[name] = Transposed(moved) if isinstance(value, Transposed) else moved
    return model


def active(model: Model) -> Adapter:
    return model.adapters[model.active_adapter or ""]


def lora_changes(trained: Model) -> dict[str, float]:
    """How far each adapted weight has moved, ‖α d u‖, by the name of the weight."""
    adapter, stored = active(trained), stored_weights(trained.config)
    found = {}
    for layer, lora in adapter.layers.items():
        down, up = trained.params[adapter.down(layer)], trained.params[adapter.up(layer)]  # (r, in), (out, r)
        square = float(((up.T @ up) * (down @ down.T)).sum())
        found[stored[lora.base_layer].tensor] = lora.scale * max(square, 0.0) ** 0.5
    return found
