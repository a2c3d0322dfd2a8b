"""Trace: every activation and its gradient in one pass, by the paper's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from onfoot.arrays import Array, namespace
from onfoot.config import GPT2Config
from onfoot.models.layout import Layout, split_heads
from onfoot.models.params import TOKEN_TABLE
from onfoot.ops.attention import attention_weights, softmax, softmax_backward
from onfoot.ops.embedding import embedding_input_gradient


@dataclass
class BlockTrace:
    """One block: a[1] ... a[10], delta[1] ... delta[10], and the arrays inside its heads, all (B, H, ...)."""

    a: dict[int, Array] = field(default_factory=dict)
    delta: dict[int, Array] = field(default_factory=dict)
    q: Array = None  # (B, H, T, d_ρ)
    k: Array = None  # (B, H, T, d_ρ)
    v: Array = None  # (B, H, T, d_h)
    rho: Array = None  # (B, H, T, T)
    delta_causal: Array = None  # (B, H, T, T)
    dk: Array = None  # (B, H, T, d_ρ), the gradient of the keys as computed in the pass


@dataclass
class Trace:
    """The whole network. `trace["a_5", 0]` is a_5 of the first block; `trace["Δ_12"]` is not in a block."""

    loss: float
    a: dict[int | str, Array]  # 0, "tok", "pos", 11, 12, "pred"
    delta: dict[int, Array]  # 11, 12, and 0 if requested
    blocks: list[BlockTrace]
    grads: dict[str, Array]

    def __getitem__(self, key: str | tuple[str, int]) -> Array:
        name, block = (key, None) if isinstance(key, str) else key
        for found, found_block, value in self.items():
            if found == name and found_block == block:
                return value
        raise KeyError(
            f"no {name!r} in block {block}; available: " + ", ".join(sorted({n for n, _, _ in self.items()}))
        )

    def items(self) -> Iterator[tuple[str, int | None, Array]]:
        """(name, block or None, array), in the order of the forward pass, then of the backward pass."""
        for index, value in self.a.items():
            if index not in (11, 12, "pred"):
                yield f"a_{index}", None, value
        for b, block in enumerate(self.blocks):
            for i, value in block.a.items():
                yield f"a_{i}", b, value
                if i == 2:
                    yield from (("q", b, block.q), ("k", b, block.k), ("v", b, block.v), ("ρ", b, block.rho))
        yield "a_11", None, self.a[11]
        yield "a_12", None, self.a[12]
        yield "y_pred", None, self.a["pred"]
        yield "Δ_12", None, self.delta[12]
        yield "Δ_11", None, self.delta[11]
        for b in reversed(range(len(self.blocks))):
            for i in reversed(self.blocks[b].delta):
                yield f"Δ_{i}", b, self.blocks[b].delta[i]
                if i == 3:
                    yield "Δ_causal", b, self.blocks[b].delta_causal
        if 0 in self.delta:
            yield "Δ_0", None, self.delta[0]


# The paper's names of a layer's output ("ln_1") and of the gradient of its input ("d ln_1").
IN_A_BLOCK = {
    "ln_1": ["a_2"],
    "attn.q": ["q"],
    "attn.k": ["k"],
    "attn.v": ["v"],
    "attn": ["a_3"],
    "attn.c_proj": ["a_4"],
    "attn.c_proj + skip": ["a_5"],
    "ln_2": ["a_6"],
    "mlp.c_fc": ["a_7"],
    "mlp.act": ["a_8"],
    "mlp.c_proj": ["a_9"],
    "mlp.c_proj + skip": ["a_10"],
    "d mlp.c_proj": ["Δ_8"],
    "d mlp.act": ["Δ_7"],
    "d mlp.c_fc": ["Δ_6"],
    "d ln_2": ["Δ_5", "Δ_4"],
    "d attn.c_proj": ["Δ_3"],
    "d attn.k": ["dk"],
    "d attn.c_attn": ["Δ_2"],
    "d ln_1": ["Δ_1"],
}
IN_THE_NETWORK = {
    "transformer.wte.weight": "a_tok",
    "transformer.wpe.weight": "a_pos",
    "transformer.ln_f": "a_11",
    "lm_head": "a_12",
    "d lm_head out": "Δ_12",
    "d lm_head": "Δ_11",
}


def paper_names(on_activation: Callable[[str, Array], None]) -> Callable[[str, Array], None]:
    """Wraps a callback to receive the paper's names: "a_11" of the network, "0.a_5" of block 0."""

    def on_step(step: str, value: Array) -> None:
        sign, _, index = step.rpartition("block ")
        if index.isdecimal():
            for name in ["Δ_10", "Δ_9"] if sign else ["a_1"]:
                on_activation(f"{index}.{name}", value)
            return
        if step in IN_THE_NETWORK:
            on_activation(IN_THE_NETWORK[step], value)
        before, found, rest = step.partition("transformer.h.")
        if found:
            b, _, layer = rest.partition(".")
            for name in IN_A_BLOCK.get(before + layer, ()):
                on_activation(f"{b}.{name}", value)

    return on_step


class Recorder:
    """Collects the activations of a pass, by network and block."""

    def __init__(self, n_blocks: int) -> None:
        self.network: dict[str, Array] = {}
        self.blocks: list[dict[str, Array]] = [{} for _ in range(n_blocks)]

    def __call__(self, name: str, value: Array) -> None:
        head, _, rest = name.partition(".")
        if rest:
            self.blocks[int(head)][rest] = value
        else:
            self.network[name] = value


def build_trace(
    recorder: Recorder,
    tokens: Array,
    config: GPT2Config,
    params: dict[str, Array],
    loss: float,
    grads: dict[str, Array],
    layout: Layout,
    input_gradient: bool,
) -> Trace:
    """Builds a `Trace` from collected activations, and computes the arrays inside each head from the formulas."""
    network: dict[str, Any] = recorder.network
    start = None if layout.start is None else layout.start[:, None]
    blocks = []
    for n in recorder.blocks:
        a = {i: n[f"a_{i}"] for i in range(1, 11)}
        delta = {i: n[f"Δ_{i}"] for i in range(1, 11)}
        rho = attention_weights(n["q"], n["k"], config.causal, start)
        d3 = split_heads(delta[3], config.n_head)  # (B, H, T, d_h)
        delta_causal = softmax_backward(d3 @ namespace(d3).swapaxes(n["v"], -1, -2), rho)  # eq 25
        blocks.append(BlockTrace(a, delta, n["q"], n["k"], n["v"], rho, delta_causal, n["dk"]))
    trace = Trace(
        loss=loss,
        a={0: tokens, "tok": network["a_tok"], "pos": network["a_pos"], 11: network["a_11"], 12: network["a_12"]},
        delta={12: network["Δ_12"], 11: network["Δ_11"]},
        blocks=blocks,
        grads=grads,
    )
    trace.a["pred"] = softmax(network["a_12"])
    if input_gradient:
        trace.delta[0] = embedding_input_gradient(blocks[0].delta[1], params[TOKEN_TABLE])  # eq EMB.1
    return trace
