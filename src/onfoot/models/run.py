"""One pass through a network: the engine's pairs bound to the names of parameters.

The pairs are pure; a run finds the parameters of a layer by its name, and adds up their gradients. A model says
`y, saved = run.linear(layer, x)` on the way down and `dx = run.linear_backward(layer, dy, saved)` on the way up. All
that is not the model's mathematics is done here: dropout, the KV cache, computing again what was not kept, and telling
a listener of every step. (Linear layers are in `linears`, gradients in `gradients`.)
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
from onfoot.models.layout import merge_heads, split_heads
from onfoot.models.linears import Linears
from onfoot.ops.dropout import dropout_pattern
from onfoot.recording.planned import active

Note = Callable[[str, Array], None]
Block = Callable[..., tuple[Array, Any]]
BlockBackward = Callable[..., Array]
LARGE = 1 << 18  # numbers, from which an array that is quickly computed again is not kept


@dataclass(frozen=True)
class Policy:
    """How a pass is to be made."""

    trainable: set[str]
    dtype: str
    adapter: Adapter | None = None
    dropout_seed: int | None = None  # None: nothing is dropped
    keep_saved: bool = True  # False where no backward pass follows
    recompute: bool = False  # a block's activations are not kept, but computed again on the way back
    note: Note | None = None  # hears of every step: none may be fused with another


class Dropped(NamedTuple):
    """A dropout pattern that is drawn before each replay."""

    name: str
    p: float


class Lean(NamedTuple):
    """What a layer saved, without its input x, and how to compute that again."""

    saved: Any
    again: Callable[[], Array]


class Again(NamedTuple):
    """What a block's backward pass needs, not kept but computed again."""

    saved: Callable[[], Any]


class Run:
    """What one pass needs: the engine, the parameters, the policy, and where gradients go."""

    def __init__(
        self, engine: Engine, config: Config, params: dict[str, Array], policy: Policy, cache: Any = None
    ) -> None:
        self.engine, self.params, self.policy = engine, params, policy
        self.cache = cache  # keys and values of the tokens before these, where tokens are generated
        self.traced = policy.note is not None
        self.keep_saved = policy.keep_saved
        self.on_loss: Callable[[Any], None] | None = None
        self.gradients = Gradients(engine, config, policy.trainable, policy.adapter)
        self.linears = Linears(self, config)
        self._cheap: dict[int, tuple[Any, Callable[[], Array]]] = {}  # arrays that are quickly computed again

    # What every pass tells

    def note(self, name: str, value: Array) -> None:
        """Tells the listener, if there is one."""
        if self.policy.note is not None:
            self.policy.note(name, value)

    def hear(self, loss: Any) -> None:
        """The loss, before the first gradient."""
        self._cheap.clear()  # the forward pass is over; what is kept here would keep this pass alive
        if self.on_loss is not None:
            self.on_loss(loss)

    # Blocks

    def block(self, forward: Block, *args: Any) -> tuple[Array, Any]:
        """A block's output and what its backward pass needs; with `recompute`, only how to compute that again."""
        if not (self.policy.recompute and self.keep_saved):
            y, saved = self._forward(forward, *args)
            return y, saved if self.keep_saved else None
        self.keep_saved = False
        y, _ = self._forward(forward, *args)
        self.keep_saved = True
        return y, Again(lambda: self._forward(forward, *args)[1])

    def _forward(self, forward: Block, config: Config, b: int, x: Array, *where: Any) -> tuple[Array, Any]:
        self.note(f"block {b}", x)
        y, saved = forward(self, config, b, x, *where)
        self._cheap.clear()  # no other block reads these
        return y, saved

    def block_backward(self, backward: BlockBackward, config: Config, b: int, dy: Array, saved: Any) -> Array:
        """The gradient of a block's input."""
        self.note(f"d block {b}", dy)
        return backward(self, config, b, dy, saved.saved() if isinstance(saved, Again) else saved)

    # Layers

    def embedding(self, table: str, ids: Array) -> tuple[Array, Any]:
        y, saved = self.engine.embedding_forward(ids, self.params[table])
        self.note(table, y)
        return y, saved

    def embedding_backward(self, table: str, dy: Array, saved: Any) -> None:
        self.gradients.add_rows(table, dy, saved)

    def linear(self, layer: str, x: Array) -> tuple[Array, Any]:
        """y = x w + b, and what an adapter adds."""
        y, saved = self.linears.forward(layer, x)
        self.note(layer, y)
        return y, self._lean(x, saved)

    def linear_backward(self, layer: str, dy: Array, saved: Any, dead: slice | None = None) -> Array:
        """The gradient of x. `dead` names the columns of the bias that cannot act: their gradient is written as 0."""
        dx = self.linears.backward(layer, dy, self._whole(saved), dead)
        self.note(f"d {layer}", dx)
        return dx

    def linear_skip(self, layer: str, x: Array, skip: Array, p: float = 0.0) -> tuple[Array, Any]:
        """skip + dropout(x w + b): a layer that closes a skip."""
        if not self.traced and (p == 0 or self.policy.dropout_seed is None) and self.engine.has("linear_skip"):
            y, saved = self.linears.forward(layer, x, skip)
            return y, (self._lean(x, saved), None)
        y, saved = self.linears.forward(layer, x)
        y, s_drop = self.dropout(layer, y, p)
        self.note(layer, y)
        y = self.engine.add(skip, y)
        self.note(f"{layer} + skip", y)
        return y, (self._lean(x, saved), s_drop)

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
        self.note(layer, y)
        self._remember(y, forward)
        return y, saved

    def layer_norm_backward(self, layer: str, dy: Array, saved: Any, past: Array | None = None) -> Array:
        """The gradient of x, to which `past` is added: what comes down the skip beside the norm."""
        return self._norm_backward("layer_norm", ("weight", "bias"), layer, dy, saved, past)

    def rms_norm_backward(self, layer: str, dy: Array, saved: Any, past: Array | None = None) -> Array:
        """The gradient of x, to which `past` is added: what comes down the skip beside the norm."""
        return self._norm_backward("rms_norm", ("weight",), layer, dy, saved, past)

    def _norm_backward(
        self, pair: str, names: Sequence[str], layer: str, dy: Array, saved: Any, past: Array | None
    ) -> Array:
        if past is not None and self.engine.has(f"{pair}_skip_backward"):
            dx, *grads = getattr(self.engine, f"{pair}_skip_backward")(dy, saved, past)
        else:
            dx, *grads = getattr(self.engine, f"{pair}_backward")(dy, saved)
            dx = dx if past is None else self.engine.add(past, dx)
        for name, grad in zip(names, grads, strict=True):
            self.gradients.add(f"{layer}.{name}", grad)
        self.note(f"d {layer}", dx)
        return dx

    def activation(self, layer: str, kind: str, *x: Array) -> tuple[Array, Any]:
        """A function of each number: "gelu_tanh", ... of one array, "swiglu" of two."""
        forward = getattr(self.engine, f"{kind}_forward")
        y, saved = forward(*x)
        self.note(layer, y)
        self._remember(y, lambda: forward(*x))
        return y, saved

    def activation_backward(self, layer: str, kind: str, dy: Array, saved: Any) -> Any:
        dx = getattr(self.engine, f"{kind}_backward")(dy, saved)
        self.note(f"d {layer}", dx)
        return dx

    def attention(
        self, layer: str, q: Array, k: Array, v: Array, causal: bool, start: Array | None, p: float
    ) -> tuple[Array, Any]:
        """ρ v of all heads side by side, (B, T, H D), from q, k and v (B, H, T, D).

        Before these tokens stand those of the cache, if there is one.
        """
        for name, x in zip("qkv", (q, k, v), strict=True):
            self.note(f"{layer}.{name}", x)
        start = None if start is None else start[:, None]  # (B, 1, T): the same for all heads
        if self.cache is not None:
            if q.shape[2] == 1 and self.engine.has("cached_attention") and not self.traced:
                first = None if start is None else start.reshape(-1)  # (B,)
                y = self.engine.cached_attention(q, k, v, *self.cache.room(layer, k, v), self.cache.lengths, first)
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
        self.note(layer, y)
        if 2 * k.shape[2] <= y.shape[2]:  # of few tokens, attention costs little beside the layers around it
            self._remember(y, forward)
        return y, (saved, grouped, q.shape[1])

    def attention_backward(self, layer: str, dy: Array, saved: Any) -> tuple[Array, Array, Array]:
        """The gradients of q, k and v, (B, H, T, D)."""
        s_attention, grouped, heads = saved
        backward = self.engine.grouped_query_backward if grouped else self.engine.attention_backward
        dq, dk, dv = backward(split_heads(dy, heads), s_attention)
        self.note(f"d {layer}.k", dk)
        return dq, dk, dv

    def side_by_side(self, *parts: Array) -> Array:
        """(..., A), (..., B), ... -> (..., A + B + ...)."""
        if self.engine.has("side_by_side"):
            return self.engine.side_by_side(parts)
        return namespace(parts[0]).concatenate(parts, axis=-1)

    # Dropout

    def dropout_keep(self, name: str, shape: Shape, p: float) -> Array | None:
        """The dropout pattern of this place in this pass, or None where nothing is dropped."""
        if self.policy.dropout_seed is None or p == 0:
            return None
        if active.recorder is not None:
            return active.recorder.input(shape, self.policy.dtype, Dropped(name, p))
        return self.engine.floats(self.pattern(name, shape, p), self.policy.dtype)

    def pattern(self, name: str, shape: Shape, p: float) -> Any:
        """The same as an array of NumPy's."""
        assert self.policy.dropout_seed is not None
        seed = (self.policy.dropout_seed, zlib.crc32(name.encode()))  # another pattern at every place
        return dropout_pattern(shape, p, seed, self.policy.dtype)

    def dropout(self, name: str, x: Array, p: float) -> tuple[Array, Any]:
        keep = self.dropout_keep(name, tuple(x.shape), p)
        return (x, None) if keep is None else self.engine.dropout_forward(x, keep)

    def dropout_backward(self, dy: Array, saved: Any) -> Array:
        return dy if saved is None else self.engine.dropout_backward(dy, saved)

    # What is computed again

    def _remember(self, y: Array, forward: Callable[[], tuple[Array, Any]]) -> None:
        """Notes how to compute a large array again that a layer reads: it need not be kept then."""
        if self.engine.lean and self.keep_saved and math.prod(y.shape) >= LARGE:
            self._cheap[id(y)] = weakref.ref(y), lambda: forward()[0]

    def _lean(self, x: Array, saved: Any) -> Any:
        known = self._cheap.get(id(x))
        if known is None or known[0]() is not x or not hasattr(saved, "x"):
            return saved
        return Lean(saved._replace(x=None), known[1])

    def _whole(self, saved: Any) -> Any:
        return saved.saved._replace(x=saved.again()) if isinstance(saved, Lean) else saved
