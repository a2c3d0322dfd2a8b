"""The pairs that an engine has: their gradients, the shapes of their results, and which pairs are made of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from onfoot.arrays import Array, Shape
from onfoot.engine import OPS
from onfoot.ops.grouped_query import grouped

# pair -> the arguments of its forward function whose gradients its backward function returns, in order
GRADIENTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v"),
    "cross_entropy": ("logits",),
    "dropout": ("x",),
    "embedding": ("weight",),
    "frozen_linear": ("x",),
    "gelu_erf": ("x",),
    "gelu_tanh": ("x",),
    "grouped_query": ("q", "k", "v"),
    "layer_norm": ("x", "weight", "bias"),
    "linear": ("x", "weight", "bias"),
    "lora": ("x", "down", "up"),
    "lora_linear": ("x", "down", "up"),
    "relu": ("x",),
    "rms_norm": ("x", "weight"),
    "rope": ("x",),
    "swiglu": ("gate", "up"),
}
# which no network runs on: these have q, k and v in one product, and layer norm or RMS norm
UNUSED = ("batch_norm", "head", "heads", "multi_head")
PAIRS = tuple(sorted((*GRADIENTS, *UNUSED)))
# pair -> the pairs that it is made of, unless the user has it too
PARTS: Mapping[str, tuple[str, ...]] = {
    "frozen_linear": ("linear",),
    "lora_linear": ("linear", "lora"),
    "grouped_query": ("attention",),
}


class Pair(NamedTuple):
    """A forward function and its backward function."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]


def ours(pair: str) -> Pair:
    """The pair of `ops/`."""
    return Pair(OPS[f"{pair}_forward"], OPS[f"{pair}_backward"])


def result_shape(pair: str, given: Mapping[str, Any]) -> Shape:
    """The shape of y, from the forward function's arguments by name."""
    if pair == "cross_entropy":
        return ()
    if pair == "embedding":
        return (*given["ids"].shape, *given["weight"].shape[1:])
    if pair in ("attention", "grouped_query"):
        return (*given["q"].shape[:-1], given["v"].shape[-1])
    if pair in ("linear", "frozen_linear", "lora_linear", "lora"):
        return (*given["x"].shape[:-1], given["up" if pair == "lora" else "weight"].shape[-1])
    return tuple(given[GRADIENTS[pair][0]].shape)


def table_of(pairs: Mapping[str, Pair]) -> dict[str, Callable[..., Any]]:
    """An engine's table: the given pairs, those that are made of them, and ours for the rest."""
    made = dict(pairs)
    if "linear" in made and "frozen_linear" not in made:
        made["frozen_linear"] = _frozen(made["linear"])
    if {"frozen_linear", "lora"} & set(made) and "lora_linear" not in made:
        made["lora_linear"] = _with_lora(*(made.get(name, ours(name)) for name in ("frozen_linear", "lora")))
    if "attention" in made and "grouped_query" not in made:
        made["grouped_query"] = _shared_heads(made["attention"])
    table = dict(OPS)
    for name, pair in made.items():
        table |= {f"{name}_forward": pair.forward, f"{name}_backward": pair.backward}
    return table


def _frozen(linear: Pair) -> Pair:
    """A linear layer of which only the gradient of x is used."""
    return Pair(linear.forward, lambda dy, saved: linear.backward(dy, saved)[0])


def _with_lora(frozen: Pair, lora: Pair) -> Pair:
    """A frozen linear layer plus a LoRA layer."""

    def forward(
        x: Array, weight: Array, bias: Array | None, down: Array, up: Array, scale: float, keep: Array | None = None
    ) -> tuple[Array, Any]:
        y, s_frozen = frozen.forward(x, weight, bias)
        low_rank, s_lora = lora.forward(x if keep is None else x * keep, down, up, scale)
        return y + low_rank, (s_frozen, keep, s_lora)  # eq LORA.1

    def backward(dy: Array, saved: Any) -> tuple[Array, Array, Array]:
        s_frozen, keep, s_lora = saved
        dx_lora, ddown, dup = lora.backward(dy, s_lora)
        dx = frozen.backward(dy, s_frozen) + (dx_lora if keep is None else dx_lora * keep)  # eq LORA.2
        return dx, ddown, dup

    return Pair(forward, backward)


def _shared_heads(attention: Pair) -> Pair:
    """Grouped-query attention: every query head gets its own copy of the keys and values that it shares."""

    def forward(
        q: Array, k: Array, v: Array, causal: bool = True, start: Array | None = None, keep: Array | None = None
    ) -> tuple[Array, Any]:
        heads = [h * k.shape[-3] // q.shape[-3] for h in range(q.shape[-3])]  # of k and v, per query head
        y, saved = attention.forward(q, k[..., heads, :, :], v[..., heads, :, :], causal, start, keep)  # eq GQA.1
        return y, (saved, k.shape[-3])

    def backward(dy: Array, saved: Any) -> tuple[Array, Array, Array]:
        s_attention, n_kv = saved
        dq, dk, dv = attention.backward(dy, s_attention)
        return dq, grouped(dk, n_kv).sum(axis=-3), grouped(dv, n_kv).sum(axis=-3)  # eq GQA.2, GQA.3

    return Pair(forward, backward)
