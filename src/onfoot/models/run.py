"""One pass through a network: the engine's pairs bound to the names of parameters.

The pairs are pure; here their gradients get names and are added up. A model says `y, saved = run.linear(layer, x)` on
the way down and `dx = run.linear_backward(layer, dy, saved)` on the way up. Which pair a linear layer is depends on
what trains: the layer itself, nothing (frozen), or a low-rank companion beside it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from onfoot.arrays import Array, Shape
from onfoot.config import Config
from onfoot.engine import Engine
from onfoot.models.adapters import Adapter
from onfoot.models.layout import Layout
from onfoot.models.params import HEAD, layer_order, stored_weights
from onfoot.ops.dropout import dropout_pattern

Note = Callable[[str, Array], None]
LARGE = 1 << 19  # numbers, from which an input that is quickly computed again is not kept
Take = Callable[[str, Array], None]
Block = Callable[..., tuple[Array, Any]]
BlockBackward = Callable[..., Array | None]


class Lean(NamedTuple):
    """What a linear layer saved, without its input, and how to have that again."""

    saved: Any
    again: Callable[[], Array]


class Again(NamedTuple):
    """What a block's backward pass needs, not kept but computed again."""

    saved: Callable[[], Any]


class Run:
    """What one pass needs: the engine, the parameters, which of them train, and where gradients go."""

    def __init__(
        self,
        engine: Engine,
        config: Config,
        params: dict[str, Array],
        trainable: set[str],
        dtype: str,
        adapter: Adapter | None = None,
        dropout_seed: int | None = None,
        keep_saved: bool = True,
        note: Note | None = None,
        recompute: bool = False,
    ) -> None:
        self.engine = engine
        self.params = params
        self.trainable = trainable
        self.dtype = dtype
        self.adapter = adapter
        self.dropout_seed = dropout_seed
        self.keep_saved = keep_saved  # False where no backward pass follows
        self.note: Note = note or (lambda name, value: None)
        self.traced = note is not None  # every step is to be heard of: none may be fused with another
        self.recompute = recompute
        self.grads: dict[str, Array] = {}
        self.take: Take | None = None
        self.on_loss: Callable[[float], None] | None = None
        self._stored = stored_weights(config)
        self._found: dict[str, tuple[Array, Array | None]] = {}
        self._order = layer_order(config)  # the layers, numbered as the forward pass meets them
        self._lowest: int | None = None

    def _layer(self, parameter: str) -> str:
        """The layer that a parameter belongs to; a companion belongs to the layer it stands beside."""
        layer, _, low_rank = parameter.partition(".lora_")
        if low_rank and self.adapter is not None:
            return self.adapter.layers[layer].beside
        return parameter.rpartition(".")[0]

    def go_to_the_bottom(self) -> None:
        """Lets the error signal go all the way down, whatever trains."""
        self._lowest = -1

    def hear(self, loss: float) -> None:
        """The loss, before the first gradient."""
        if self.on_loss is not None:
            self.on_loss(float(loss))

    def add(self, name: str, grad: Array | None, final: bool = True) -> None:
        """Adds to a parameter's gradient. A parameter used twice (tied weights) gets the sum of both paths.

        With the path that is `final`, the gradient goes to `take`, if anyone wants it before the pass has ended.
        """
        if name not in self.trainable:
            return
        if grad is not None:
            self.grads[name] = self.grads[name] + grad if name in self.grads else grad
        if final and self.take is not None and name in self.grads:
            self.take(name, self.grads.pop(name))

    def add_all(self, names: Sequence[str], grads: Sequence[Array]) -> None:
        """The gradients of parameters that all train, each complete: no other path adds to any.

        `take` gets them from the last layer to the first, as from any backward pass.
        """
        if self.take is None:
            self.grads.update(zip(names, grads, strict=True))
            return
        for name, grad in zip(reversed(names), reversed(grads), strict=True):
            self.take(name, grad)

    def trains_below(self, layer: str) -> bool:
        """Whether anything before this layer trains: if not, the error signal need not go on."""
        if self._lowest is None and f"{next(iter(self._order))}.weight" in self.trainable:
            self._lowest = 0
        elif self._lowest is None:
            order = self._order
            self._lowest = min((order[self._layer(name)] for name in self.trainable), default=len(order))
        return self._lowest < self._order[layer]

    def block(self, forward: Block, *args: Any) -> tuple[Array, Any]:
        """A block's output, and what its backward pass needs: with `recompute`, no more than how to have it again."""
        if not (self.recompute and self.keep_saved):
            return forward(self, *args)
        self.keep_saved = False
        y, _ = forward(self, *args)
        self.keep_saved = True
        return y, Again(lambda: forward(self, *args)[1])

    def block_backward(self, backward: BlockBackward, config: Config, b: int, dy: Array, saved: Any) -> Array | None:
        """The gradient of a block's input."""
        return backward(self, config, b, dy, saved.saved() if isinstance(saved, Again) else saved)

    def embedding_backward(self, table: str, dy: Array, saved: Any) -> None:
        """The last gradient that a table gets: only the rows of the ids that occurred."""
        if table not in self.trainable:
            return
        if table in self.grads and self.engine.has("embedding_add_backward"):
            self.engine.embedding_add_backward(dy, saved, self.grads[table])  # eq TIE.1
            self.add(table, None)
        else:
            self.add(table, self.engine.embedding_backward(dy, saved))

    def linear(self, layer: str, x: Array, again: Callable[[], Array] | None = None) -> tuple[Array, Any]:
        """y = x w + b and what stands beside it. `again` computes x once more, where that is better than to keep it."""
        y, saved = self._linear(layer, x)
        return y, self._lean(x, saved, again)

    def linear_skip(
        self,
        layer: str,
        x: Array,
        skip: Array,
        p: float = 0.0,
        again: Callable[[], Array] | None = None,
        name: str = "",
    ) -> tuple[Array, Any]:
        """skip + dropout(x w + b): a layer that closes a skip. `name` is what its own output is called."""
        if not self.traced and (p == 0 or self.dropout_seed is None) and self.engine.has("linear_skip"):
            y, saved = self._linear(layer, x, skip)
            return y, (self._lean(x, saved, again), None)
        y, saved = self.linear(layer, x, again)
        y, s_drop = self.dropout(layer, y, p)
        self.note(name, y)
        return self.engine.add(skip, y), (saved, s_drop)

    def linear_skip_backward(self, layer: str, dy: Array, saved: Any) -> Array:
        """The gradient of x; that of the skip is dy itself."""
        s_linear, s_drop = saved
        return self.linear_backward(layer, self.dropout_backward(dy, s_drop), s_linear)

    def _lean(self, x: Array, saved: Any, again: Callable[[], Array] | None) -> Any:
        if again is not None and self.engine.lean and math.prod(x.shape) >= LARGE and hasattr(saved, "x"):
            return Lean(saved._replace(x=None), again)
        return saved

    def _linear(self, layer: str, x: Array, skip: Array | None = None) -> tuple[Array, Any]:
        weight, bias = self._weights(layer)
        companions = [] if self.adapter is None else self.adapter.companions(layer)
        beside, form = ((), "forward") if skip is None else ((skip,), "skip")
        if companions == [layer]:
            forward = getattr(self.engine, f"lora_linear_{form}")
            return forward(x, weight, bias, *beside, *self._companion(layer, x))
        if companions:
            y, saved = self._parts(companions, x, weight, bias)
            return y if skip is None else self.engine.add(skip, y), saved
        kind = "linear" if self.keep_saved and self._weight_trains(layer) else "frozen_linear"
        return getattr(self.engine, f"{kind}_{form}")(x, weight, bias, *beside)

    def _weights(self, layer: str) -> tuple[Array, Array | None]:
        """The layer's w, (in, out), and b."""
        found = self._found.get(layer)
        if found is None:
            stored = self._stored[layer]
            weight = self.params[stored.tensor]
            found = self._found[layer] = (weight.T if stored.out_in else weight, self.params.get(f"{layer}.bias"))
        return found

    def linear_backward(self, layer: str, dy: Array, saved: Any, dead: slice | None = None) -> Array:
        """The gradient of x. `dead` names the columns of the bias that cannot act: their gradient is written as 0."""
        if isinstance(saved, Lean):
            saved = saved.saved._replace(x=saved.again())
        companions = [] if self.adapter is None else self.adapter.companions(layer)
        if companions == [layer]:
            dx, ddown, dup = self.engine.lora_linear_backward(dy, saved)
            self._add_companion(layer, ddown, dup)
            return dx
        if companions:
            return self._parts_backward(dy, saved)
        if not self._weight_trains(layer):
            return self.engine.frozen_linear_backward(dy, saved)
        dx, dweight, dbias = self.engine.linear_backward(dy, saved)
        if dead is not None and dbias is not None:
            dbias[dead] = 0
        stored = self._stored[layer]
        own = stored.tensor == f"{layer}.weight"  # another layer's tensor gets its last gradient there
        self.add(stored.tensor, dweight.T if stored.out_in else dweight, final=own)
        self.add(f"{layer}.bias", dbias)
        return dx

    def fuses_loss(self) -> bool:
        """Whether head and loss are one pair in this pass: not where the logits are asked for or have a companion."""
        adapted = self.adapter is not None and bool(self.adapter.companions(HEAD))
        return self.engine.has("logits_loss_forward") and not self.traced and not adapted

    def logits_loss(self, layer: str, x: Array, targets: Array, divisor: float) -> tuple[float, Any]:
        """The loss of the logits x wᵗ + b."""
        where = x, self.params[self._stored[layer].tensor], self.params.get(f"{layer}.bias"), targets, divisor
        if not self.keep_saved:
            return float(self.engine.logits_loss_value(*where)), None
        trains = self._weight_trains(layer)
        forward = self.engine.logits_loss_forward if trains else self.engine.frozen_logits_loss_forward
        loss, saved = forward(*where)
        return float(loss), saved

    def logits_loss_backward(self, layer: str, saved: Any) -> Array:
        """The gradient of x."""
        if not self._weight_trains(layer):
            return self.engine.frozen_logits_loss_backward(1.0, saved)
        dx, dweight, dbias = self.engine.logits_loss_backward(1.0, saved)
        tensor = self._stored[layer].tensor
        self.add(tensor, dweight, final=tensor == f"{layer}.weight")
        self.add(f"{layer}.bias", dbias)
        return dx

    def _weight_trains(self, layer: str) -> bool:
        return self._stored[layer].tensor in self.trainable or f"{layer}.bias" in self.trainable

    def _companion(self, name: str, x: Array) -> tuple[Array, Array, float, Array | None]:
        """A companion's d, u, scale, and the dropout pattern of its input."""
        assert self.adapter is not None
        companion = self.adapter.layers[name]
        down, up = self.params[self.adapter.down(name)].T, self.params[self.adapter.up(name)].T
        return down, up, companion.scale, self.dropout_keep(f"{name}.lora", tuple(x.shape), companion.dropout)

    def _add_companion(self, name: str, ddown: Array, dup: Array) -> None:
        assert self.adapter is not None
        self.add(self.adapter.down(name), ddown.T)
        self.add(self.adapter.up(name), dup.T)

    def _parts(self, companions: list[str], x: Array, weight: Array, bias: Array | None) -> tuple[Array, Any]:
        """A frozen layer whose parts (queries, keys, values) have companions of their own."""
        assert self.adapter is not None
        y, s_frozen = self.engine.frozen_linear_forward(x, weight, bias)
        beside = []
        for name in companions:
            down, up, scale, keep = self._companion(name, x)
            added, s_lora = self.engine.lora_forward(x if keep is None else x * keep, down, up, scale)
            y[..., self.adapter.layers[name].columns] += added
            beside.append((name, keep, s_lora))
        return y, (s_frozen, beside)

    def _parts_backward(self, dy: Array, saved: Any) -> Array:
        assert self.adapter is not None
        s_frozen, beside = saved
        dx = self.engine.frozen_linear_backward(dy, s_frozen)
        for name, keep, s_lora in beside:
            part, ddown, dup = self.engine.lora_backward(dy[..., self.adapter.layers[name].columns], s_lora)
            dx = dx + (part if keep is None else part * keep)
            self._add_companion(name, ddown, dup)
        return dx

    def layer_norm(self, layer: str, x: Array, eps: float) -> tuple[Array, Any]:
        return self.engine.layer_norm_forward(x, self.params[f"{layer}.weight"], self.params[f"{layer}.bias"], eps)

    def layer_norm_backward(self, layer: str, dy: Array, saved: Any, past: Array | None = None) -> Array:
        """The gradient of x, to which `past` is added: what comes down the skip beside the norm."""
        if past is None:
            dx, dweight, dbias = self.engine.layer_norm_backward(dy, saved)
        elif self.engine.has("layer_norm_skip_backward"):
            dx, dweight, dbias = self.engine.layer_norm_skip_backward(dy, saved, past)
        else:
            dx, dweight, dbias = self.engine.layer_norm_backward(dy, saved)
            dx = self.engine.add(past, dx)
        self.add(f"{layer}.weight", dweight)
        self.add(f"{layer}.bias", dbias)
        return dx

    def decodes(self, decoder: str, layout: Layout, cache: Any) -> bool:
        """Whether this is one more token of each sequence that the engine's `decoder` can take through the blocks."""
        if cache is None or not cache.length or layout.positions.shape[-1] > 1 or not self.engine.has(decoder):
            return False
        return not self.traced and not self.keep_saved and self.adapter is None and self.dropout_seed is None

    def parameters(self, layer: str) -> tuple[Array, Array | None]:
        """The weight of a layer, (in, out) where it is linear, and the bias."""
        if layer in self._stored:
            return self._weights(layer)
        return self.params[f"{layer}.weight"], self.params.get(f"{layer}.bias")

    def rms_norm(self, layer: str, x: Array, eps: float) -> tuple[Array, Any]:
        return self.engine.rms_norm_forward(x, self.params[f"{layer}.weight"], eps)

    def rms_norm_backward(self, layer: str, dy: Array, saved: Any) -> Array:
        dx, dweight = self.engine.rms_norm_backward(dy, saved)
        self.add(f"{layer}.weight", dweight)
        return dx

    def dropout_keep(self, name: str, shape: Shape, p: float) -> Array | None:
        """The dropout pattern of this place in this pass, or None where nothing is dropped."""
        if self.dropout_seed is None or p == 0:
            return None
        seed = (self.dropout_seed, zlib.crc32(name.encode()))  # another pattern at every place
        return self.engine.floats(dropout_pattern(shape, p, seed, self.dtype), self.dtype)

    def dropout(self, name: str, x: Array, p: float) -> tuple[Array, Any]:
        keep = self.dropout_keep(name, tuple(x.shape), p)
        return (x, None) if keep is None else self.engine.dropout_forward(x, keep)

    def dropout_backward(self, dy: Array, saved: Any) -> Array:
        return dy if saved is None else self.engine.dropout_backward(dy, saved)
