"""One pass through a network: the engine's pairs bound to the names of parameters.

The pairs are pure; a run looks up the parameters of a layer by name, and accumulates their gradients. A model calls
`y, saved = run.linear(layer, x)` in the forward pass and `dx = run.linear_backward(layer, dy, saved)` in the backward
pass. Everything but the model's mathematics is done here: dropout, the KV cache, recomputation, and tracing. (Linear
layers are in `linears`, gradients in `gradients`.)
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onfoot.arrays import Array, Shape, namespace
from onfoot.config import Config
from onfoot.engine import Engine
from onfoot.models.adapters import Adapter
from onfoot.models.gradients import Gradients
from onfoot.models.linears import Linears
from onfoot.ops.dropout import dropout_pattern
from onfoot.ops.multi_head import merge_heads, split_heads
from onfoot.recording.recorded_array import active

OnActivation = Callable[[str, Array], None]
Block = Callable[..., tuple[Array, Any]]
BlockBackward = Callable[..., Array]
LARGE = 1 << 18  # elements: arrays from this size on are recomputed, not kept, if that is cheap


@dataclass(frozen=True)
class Policy:
    """How a pass is run."""

    trainable: set[str]
    dtype: str
    adapter: Adapter | None = None
    dropout_seed: int | None = None  # None: no dropout
    keep_saved: bool = True  # False if no backward pass follows
    recompute: bool = False  # activation checkpointing: a block's activations are recomputed in the backward pass
    on_activation: OnActivation | None = None  # called with the result of every step; no steps are fused


class Dropped(NamedTuple):
    """A dropout pattern that is drawn before each replay."""

    name: str
    p: float


class Cheap:
    """An array that is recomputed in the backward pass, once for all layers that read it."""

    def __init__(self, forward: Callable[[], tuple[Array, Any]]) -> None:
        self.forward = forward
        self.readers = 0  # layers that still need it
        self.value: Array | None = None

    def read(self) -> Array:
        """The array; it is dropped after its last reader."""
        value = self.forward()[0] if self.value is None else self.value
        self.readers -= 1
        self.value = value if self.readers else None
        return value


class WithoutInput(NamedTuple):
    """What a layer saved without its input x, and how x is recomputed."""

    saved: Any
    x: Cheap


class Recompute(NamedTuple):
    """A function that recomputes what a block's backward pass needs."""

    saved: Callable[[], Any]


class Run:
    """One pass: the engine, the parameters, the policy and the gradients."""

    def __init__(
        self, engine: Engine, config: Config, params: dict[str, Array], policy: Policy, cache: Any = None
    ) -> None:
        self.engine, self.params, self.policy = engine, params, policy
        self.cache = cache  # the KV cache, if tokens are being generated
        self.traced = policy.on_activation is not None
        self.keep_saved = policy.keep_saved
        self.on_loss: Callable[[Any], None] | None = None
        self.gradients = Gradients(engine, config, policy.trainable, policy.adapter)
        self.linears = Linears(self, config)
        self._cheap: dict[int, tuple[Any, Cheap]] = {}  # by id, with a weak reference to the array itself

    # Callbacks

    def on_activation(self, name: str, value: Array) -> None:
        """Calls the policy's callback, if any, with a named activation or gradient."""
        if self.policy.on_activation is not None:
            self.policy.on_activation(name, value)

    def report_loss(self, loss: Any) -> None:
        """Calls `on_loss`, if set, before the first gradient is computed."""
        self._cheap.clear()  # the forward pass is over; these closures would keep the pass alive
        if self.on_loss is not None:
            self.on_loss(loss)

    # Blocks

    def block(self, forward: Block, *args: Any) -> tuple[Array, Any]:
        """A block's output and what its backward pass needs; with `recompute`, a function that recomputes it."""
        if not (self.policy.recompute and self.keep_saved):
            y, saved = self._forward(forward, *args)
            return y, saved if self.keep_saved else None
        self.keep_saved = False
        y, _ = self._forward(forward, *args)
        self.keep_saved = True
        return y, Recompute(lambda: self._forward(forward, *args)[1])

    def _forward(self, forward: Block, config: Config, b: int, x: Array, *where: Any) -> tuple[Array, Any]:
        self.on_activation(f"block {b}", x)
        y, saved = forward(self, config, b, x, *where)
        self._cheap.clear()  # only this block reads them
        return y, saved

    def block_backward(self, backward: BlockBackward, config: Config, b: int, dy: Array, saved: Any) -> Array:
        """The gradient of a block's input."""
        self.on_activation(f"d block {b}", dy)
        return backward(self, config, b, dy, saved.saved() if isinstance(saved, Recompute) else saved)

    # Layers

    def embedding(self, table: str, ids: Array) -> tuple[Array, Any]:
        y, saved = self.engine.embedding_forward(ids, self.params[table])
        self.on_activation(table, y)
        return y, saved

    def embedding_backward(self, table: str, dy: Array, saved: Any) -> None:
        self.gradients.add_rows(table, dy, saved)

    def linear(self, layer: str, x: Array) -> tuple[Array, Any]:
        """y = x w + b, plus the adapter's output."""
        y, saved = self.linears.forward(layer, x)
        self.on_activation(layer, y)
        return y, self._without_input(x, saved)

    def linear_backward(self, layer: str, dy: Array, saved: Any, dead: slice | None = None) -> Array:
        """The gradient of x. `dead` are columns of the bias that have no effect: their gradient is set to exactly 0."""
        dx = self.linears.backward(layer, dy, self._with_input(saved), dead)
        self.on_activation(f"d {layer}", dx)
        return dx

    def linear_skip(self, layer: str, x: Array, skip: Array, p: float = 0.0) -> tuple[Array, Any]:
        """skip + dropout(x w + b): a layer with its skip connection."""
        if not self.traced and (p == 0 or self.policy.dropout_seed is None) and self.engine.has("linear_skip"):
            y, saved = self.linears.forward(layer, x, skip)
            return y, (self._without_input(x, saved), None)
        y, saved = self.linears.forward(layer, x)
        y, s_drop = self.dropout(layer, y, p)
        self.on_activation(layer, y)
        y = self.engine.add(skip, y)
        self.on_activation(f"{layer} + skip", y)
        return y, (self._without_input(x, saved), s_drop)

    def linear_skip_backward(self, layer: str, dy: Array, saved: Any) -> Array:
        """The gradient of x; that of the skip is dy itself."""
        s_linear, s_drop = saved
        return self.linear_backward(layer, self.dropout_backward(dy, s_drop), s_linear)

    def layer_norm(self, layer: str, x: Array, eps: float) -> tuple[Array, Any]:
        weight, bias = self.params[f"{layer}.weight"], self.params[f"{layer}.bias"]
        return self._norm(layer, lambda: self.engine.layer_norm_forward(x, weight, bias, eps))

    def rms_norm(self, layer: str, x: Array, eps: float) -> tuple[Array, Any]:
        weight = self.params[f"{layer}.weight"]
        return self._norm(layer, lambda: self.engine.rms_norm_forward(x, weight, eps))

    def _norm(self, layer: str, forward: Callable[[], tuple[Array, Any]]) -> tuple[Array, Any]:
        y, saved = forward()
        self.on_activation(layer, y)
        self._remember(y, forward)
        return y, saved

    def layer_norm_backward(self, layer: str, dy: Array, saved: Any, skip_gradient: Array | None = None) -> Array:
        """The gradient of x, plus `skip_gradient`, that of the skip connection around the layer."""
        return self._norm_backward("layer_norm", ("weight", "bias"), layer, dy, saved, skip_gradient)

    def rms_norm_backward(self, layer: str, dy: Array, saved: Any, skip_gradient: Array | None = None) -> Array:
        """The gradient of x, plus `skip_gradient`, that of the skip connection around the layer."""
        return self._norm_backward("rms_norm", ("weight",), layer, dy, saved, skip_gradient)

    def _norm_backward(
        self, pair: str, names: Sequence[str], layer: str, dy: Array, saved: Any, skip_gradient: Array | None
    ) -> Array:
        if skip_gradient is not None and self.engine.has(f"{pair}_skip_backward"):
            dx, *grads = getattr(self.engine, f"{pair}_skip_backward")(dy, saved, skip_gradient)
        else:
            dx, *grads = getattr(self.engine, f"{pair}_backward")(dy, saved)
            dx = dx if skip_gradient is None else self.engine.add(skip_gradient, dx)
        for name, grad in zip(names, grads, strict=True):
            self.gradients.add(f"{layer}.{name}", grad)
        self.on_activation(f"d {layer}", dx)
        return dx

    def activation(self, layer: str, kind: str, *x: Array) -> tuple[Array, Any]:
        """An elementwise function: "gelu_tanh", ... of one array, "swiglu" of two."""
        forward = getattr(self.engine, f"{kind}_forward")
        y, saved = forward(*x)
        self.on_activation(layer, y)
        self._remember(y, lambda: forward(*x))
        return y, saved

    def activation_backward(self, layer: str, kind: str, dy: Array, saved: Any) -> Any:
        dx = getattr(self.engine, f"{kind}_backward")(dy, saved)
        self.on_activation(f"d {layer}", dx)
        return dx

    def attention(
        self, layer: str, q: Array, k: Array, v: Array, causal: bool, start: Array | None, p: float
    ) -> tuple[Array, Any]:
        """ρ v of all heads, concatenated to (B, T, H D), from q, k and v (B, H, T, D).

        With a KV cache, its keys and values come before these.
        """
        for name, x in zip("qkv", (q, k, v), strict=True):
            self.on_activation(f"{layer}.{name}", x)
        start = None if start is None else start[:, None]  # (B, 1, T): the same for all heads
        if self.cache is not None:
            if q.shape[2] == 1 and self.engine.has("cached_attention") and not self.traced:
                first = None if start is None else start.reshape(-1)  # (B,)
                cache = self.cache
                y = self.engine.cached_attention(q, k, v, *cache.room(layer, k, v), cache.lengths, first, cache.slots)
                if y is not None:
                    return merge_heads(y), None
            k, v = self.cache.extend(layer, k, v)
        keep = self.dropout_keep(layer, (*q.shape[:-1], k.shape[-2]), p)
        grouped = q.shape[1] != k.shape[1]
        pair = self.engine.grouped_query_forward if grouped else self.engine.attention_forward

        def forward() -> tuple[Array, Any]:
            heads_out, saved = pair(q, k, v, causal, start, keep)
            return merge_heads(heads_out), saved

        y, saved = forward()
        self.on_activation(layer, y)
        # For few tokens, attention is cheap compared with the linear layers; less so if their weights are frozen.
        if self.policy.adapter is None and 2 * k.shape[2] <= y.shape[2]:
            self._remember(y, forward)
        return y, (saved, grouped, q.shape[1])

    def attention_backward(self, layer: str, dy: Array, saved: Any) -> tuple[Array, Array, Array]:
        """The gradients of q, k and v, (B, H, T, D)."""
        s_attention, grouped, heads = saved
        backward = self.engine.grouped_query_backward if grouped else self.engine.attention_backward
        dq, dk, dv = backward(split_heads(dy, heads), s_attention)
        self.on_activation(f"d {layer}.k", dk)
        return dq, dk, dv

    def side_by_side(self, *parts: Array) -> Array:
        """Concatenates the last axis: (..., A), (..., B), ... -> (..., A + B + ...)."""
        if self.engine.has("side_by_side"):
            return self.engine.side_by_side(parts)
        return namespace(parts[0]).concatenate(parts, axis=-1)

    # Dropout

    def dropout_keep(self, name: str, shape: Shape, p: float) -> Array | None:
        """The dropout pattern of the layer `name` in this pass, or None without dropout."""
        if self.policy.dropout_seed is None or p == 0:
            return None
        if active.recorder is not None:
            return active.recorder.input(shape, self.policy.dtype, Dropped(name, p))
        return self.engine.floats(self.pattern(name, shape, p), self.policy.dtype)

    def pattern(self, name: str, shape: Shape, p: float) -> Any:
        """The dropout pattern as a NumPy array."""
        assert self.policy.dropout_seed is not None
        seed = (self.policy.dropout_seed, zlib.crc32(name.encode()))  # a different pattern per layer
        return dropout_pattern(shape, p, seed, self.policy.dtype)

    def dropout(self, name: str, x: Array, p: float) -> tuple[Array, Any]:
        keep = self.dropout_keep(name, tuple(x.shape), p)
        return (x, None) if keep is None else self.engine.dropout_forward(x, keep)

    def dropout_backward(self, dy: Array, saved: Any) -> Array:
        return dy if saved is None else self.engine.dropout_backward(dy, saved)

    # Recomputation

    def _remember(self, y: Array, forward: Callable[[], tuple[Array, Any]]) -> None:
        """Stores how to recompute a large array, so that the layer that reads it need not keep it."""
        if self.engine.recomputes_inputs and self.keep_saved and math.prod(y.shape) >= LARGE:
            self._cheap[id(y)] = weakref.ref(y), Cheap(forward)

    def _without_input(self, x: Array, saved: Any) -> Any:
        known = self._cheap.get(id(x))
        if known is None or known[0]() is not x or not hasattr(saved, "x"):
            return saved
        known[1].readers += 1
        return WithoutInput(saved._replace(x=None), known[1])

    def _with_input(self, saved: Any) -> Any:
        return saved.saved._replace(x=saved.x.read()) if isinstance(saved, WithoutInput) else saved
