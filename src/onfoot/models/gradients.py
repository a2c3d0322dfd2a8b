"""The gradients of a pass: contributions to each parameter are accumulated, and passed on once final."""

from __future__ import annotations

from collections.abc import Callable

from onfoot.arrays import Array
from onfoot.config import Config
from onfoot.engine import Engine
from onfoot.models.adapters import Adapter
from onfoot.models.params import layer_order

OnGradient = Callable[[str, Array], None]


class Gradients:
    """The gradients of the trainable parameters, by name."""

    def __init__(self, engine: Engine, config: Config, trainable: set[str], adapter: Adapter | None) -> None:
        self.engine, self.trainable, self.adapter = engine, trainable, adapter
        self.made: dict[str, Array] = {}
        self.on_gradient: OnGradient | None = None  # called with each gradient once it is final, instead of keeping it
        self._order = layer_order(config)  # layer -> its index in the forward pass
        self._lowest: int | None = None

    def add(self, name: str, grad: Array | None, final: bool = True) -> None:
        """Adds to a parameter's gradient. A parameter used twice (tied weights) gets the sum of both paths."""
        if name not in self.trainable:
            return
        if grad is not None:
            self.made[name] = self.engine.add(self.made[name], grad) if name in self.made else grad
        if final and self.on_gradient is not None and name in self.made:
            self.on_gradient(name, self.made.pop(name))

    def add_rows(self, table: str, dy: Array, saved: object) -> None:
        """Adds the final contribution to an embedding table: only the rows of ids that occurred."""
        if table not in self.trainable:
            return
        if table in self.made and self.engine.has("embedding_add_backward"):
            self.engine.embedding_add_backward(dy, saved, self.made[table])  # eq TIE.1
            self.add(table, None)
        else:
            self.add(table, self.engine.embedding_backward(dy, saved))

    def backprop_to_input(self) -> None:
        """Backpropagates all the way to the input, whatever trains."""
        self._lowest = -1

    def needs_gradient_below(self, layer: str) -> bool:
        """Whether anything before this layer trains; if not, the backward pass can stop here."""
        if self._lowest is None:
            order = self._order
            self._lowest = min((order[self._layer(name)] for name in self.trainable), default=len(order))
        return self._lowest < self._order[layer]

    def _layer(self, parameter: str) -> str:
        """The layer that a parameter belongs to; for a LoRA parameter, the base layer."""
        layer, _, low_rank = parameter.partition(".lora_")
        if low_rank and self.adapter is not None:
            return self.adapter.layers[layer].base_layer
        return parameter.rpartition(".")[0]
