"""Linear layers of a pass: the pair that computes a layer depends on what trains.

That is the layer itself, nothing (it is frozen), or its LoRA layer. The head, whose weight may be the token table, can
be fused with the loss.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from onfoot.arrays import Array
from onfoot.config import Config
from onfoot.models.params import HEAD, stored_weights

if TYPE_CHECKING:
    from onfoot.models.run import Run


class Linears:
    """The linear layers by name."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run: Run = weakref.proxy(run)  # a cycle would keep activations alive until garbage collection
        self.engine = run.engine
        self.adapter, self.trainable = run.policy.adapter, run.policy.trainable
        self._stored = stored_weights(config)

    def forward(self, layer: str, x: Array, skip: Array | None = None) -> tuple[Array, Any]:
        """y = x w + b, plus the LoRA layer's output, plus `skip` if given."""
        weight, bias = self._weights(layer)
        lora = self._lora(layer)
        skip_args, form = ((), "forward") if skip is None else ((skip,), "skip")
        if lora == [layer]:
            forward = getattr(self.engine, f"lora_linear_{form}")
            return forward(x, weight, bias, *skip_args, *self._low_rank(layer, x))
        if lora:
            y, saved = self._parts(lora, x, weight, bias)
            return y if skip is None else self.engine.add(skip, y), saved
        kind = "linear" if self.run.keep_saved and self.trains(layer) else "frozen_linear"
        return getattr(self.engine, f"{kind}_{form}")(x, weight, bias, *skip_args)

    def backward(self, layer: str, dy: Array, saved: Any, dead: slice | None) -> Array:
        """The gradient of x; those of the layer's parameters are added to the run's."""
        lora = self._lora(layer)
        if lora == [layer]:
            dx, ddown, dup = self.engine.lora_linear_backward(dy, saved)
            self._add_low_rank(layer, ddown, dup)
            return dx
        if lora:
            return self._parts_backward(dy, saved)
        if not self.trains(layer):
            return self.engine.frozen_linear_backward(dy, saved)
        dx, dweight, dbias = self.engine.linear_backward(dy, saved)
        if dead is not None and dbias is not None:
            dbias[dead] = 0
        stored = self._stored[layer]
        self._add(layer, dweight.T if stored.out_in else dweight, dbias)
        return dx

    def _add(self, layer: str, dweight: Array, dbias: Array | None) -> None:
        tensor = self._stored[layer].tensor
        own = tensor == f"{layer}.weight"  # a tied tensor gets its final gradient from the other layer
        self.run.gradients.add(tensor, dweight, final=own)
        self.run.gradients.add(f"{layer}.bias", dbias)

    def _weights(self, layer: str) -> tuple[Array, Array | None]:
        """The layer's w, (in, out), and b."""
        stored = self._stored[layer]
        weight = self.run.params[stored.tensor]
        return weight.T if stored.out_in else weight, self.run.params.get(f"{layer}.bias")

    def trains(self, layer: str) -> bool:
        """Whether the layer's own weight or bias trains."""
        return self._stored[layer].tensor in self.trainable or f"{layer}.bias" in self.trainable

    # The head with its loss

    def fuse_loss(self) -> bool:
        """Whether head and loss are fused in this pass: not if the logits are traced or have a LoRA layer."""
        return self.engine.has("logits_loss_forward") and not self.run.traced and not self._lora(HEAD)

    def loss(self, layer: str, x: Array, targets: Array, divisor: Any) -> tuple[Any, Any]:
        """The loss of the logits x wᵗ + b."""
        params = self.run.params
        where = x, params[self._stored[layer].tensor], params.get(f"{layer}.bias"), targets, divisor
        if not self.run.keep_saved:
            return self.engine.logits_loss_value(*where), None
        trains = self.trains(layer)
        return (self.engine.logits_loss_forward if trains else self.engine.frozen_logits_loss_forward)(*where)

    def loss_backward(self, layer: str, saved: Any) -> Array:
        """The gradient of x."""
        if not self.trains(layer):
            return self.engine.frozen_logits_loss_backward(1.0, saved)
        dx, dweight, dbias = self.engine.logits_loss_backward(1.0, saved)
        self._add(layer, dweight, dbias)
        return dx

    # LoRA

    def drops_inputs(self, layer: str) -> bool:
        """Whether a LoRA layer of this layer drops its inputs in this pass, by a pattern of all tokens."""
        names = self._lora(layer) if self.run.policy.dropout_seed is not None else []
        return any(self.adapter.layers[name].dropout > 0 for name in names)  # type: ignore[union-attr]

    def _lora(self, layer: str) -> list[str]:
        """The names of a layer's LoRA layers: its own name, or one per part."""
        return [] if self.adapter is None else self.adapter.lora_layers(layer)

    def _low_rank(self, name: str, x: Array) -> tuple[Array, Array, float, Array | None]:
        """d, u and the scale of a LoRA layer, and the dropout pattern of its input."""
        assert self.adapter is not None
        lora = self.adapter.layers[name]
        down, up = self.run.params[self.adapter.down(name)].T, self.run.params[self.adapter.up(name)].T
        return down, up, lora.scale, self.run.dropout_keep(f"{name}.lora", tuple(x.shape), lora.dropout)

    def _add_low_rank(self, name: str, ddown: Array, dup: Array) -> None:
        assert self.adapter is not None
        self.run.gradients.add(self.adapter.down(name), ddown.T)
        self.run.gradients.add(self.adapter.up(name), dup.T)

    def _parts(self, names: list[str], x: Array, weight: Array, bias: Array | None) -> tuple[Array, Any]:
        """A frozen layer whose parts (queries, keys, values) each have a LoRA layer."""
        assert self.adapter is not None
        y, s_frozen = self.engine.frozen_linear_forward(x, weight, bias)
        loras = []
        for name in names:
            down, up, scale, keep = self._low_rank(name, x)
            added, s_lora = self.engine.lora_forward(x if keep is None else x * keep, down, up, scale)
            y[..., self.adapter.layers[name].columns] += added
            loras.append((name, keep, s_lora))
        return y, (s_frozen, loras)

    def _parts_backward(self, dy: Array, saved: Any) -> Array:
        assert self.adapter is not None
        s_frozen, loras = saved
        dx = self.engine.frozen_linear_backward(dy, s_frozen)
        for name, keep, s_lora in loras:
            part, ddown, dup = self.engine.lora_backward(dy[..., self.adapter.layers[name].columns], s_lora)
            dx = dx + (part if keep is None else part * keep)
            self._add_low_rank(name, ddown, dup)
        return dx
