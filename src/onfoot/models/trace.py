"""Trace: every activation and its gradient in one pass, by the paper's names.

A LLaMA block has the same steps as GPT-2's, except that its MLP has two branches: a["g"], the gate, and a["u"] instead
of a[7]. Its q and k are those that attention reads, rotated and, in Qwen3, normed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from onfoot.arrays import Array, arange, namespace, rows
from onfoot.config import Config, LlamaConfig
from onfoot.models import trace_names as names
from onfoot.models.layout import Layout
from onfoot.models.params import token_table
from onfoot.models.show import trace_html, trace_text
from onfoot.ops.attention import attention_weights, softmax, softmax_backward
from onfoot.ops.cross_entropy import IGNORE, log_sum_exp
from onfoot.ops.embedding import embedding_input_gradient
from onfoot.ops.multi_head import split_heads
from onfoot.quantized import Quantized


@dataclass
class BlockTrace:
    """One block: a[1] ... a[10], delta[1] ... delta[10], and the arrays inside its heads, all (B, H, ...)."""

    a: dict[int | str, Array] = field(default_factory=dict)
    delta: dict[int | str, Array] = field(default_factory=dict)
    q: Array = None  # (B, H, T, d_ρ)
    k: Array = None  # (B, Hkv, T, d_ρ)
    v: Array = None  # (B, Hkv, T, d_h)
    rho: Array = None  # (B, H, T, T)
    delta_causal: Array = None  # (B, H, T, T)
    dk: Array = None  # (B, Hkv, T, d_ρ), the gradient of the keys as computed in the pass
    before_rope: dict[str, Array] = field(default_factory=dict)  # of LLaMA: q_lin, k_lin, and Qwen3's q_norm and k_norm


Key = str | tuple[str, int] | tuple[str, int, int]


@dataclass(repr=False)
class Trace:
    """The whole network: `trace["Δ_12"]`, `trace["a_5", 0]` of the first block, `trace["ρ", 0, 1]` of its second head.

    Negative numbers count from the last block or head. ASCII spellings work too: "delta_12", "rho", "dw_8". Of LLaMA,
    the keys and values have as many heads as there are of them, not as many as queries.
    """

    loss: float
    a: dict[int | str, Array]  # 0, "tok", "pos" (GPT-2), 11, 12, "pred"
    delta: dict[int, Array]  # 11, 12, and 0 if requested
    blocks: list[BlockTrace]
    grads: dict[str, Array]
    config: Any  # a Config
    targets: Array  # (B, T)
    starts: list[Array | None]  # per block: the first token that each token may attend to
    layout: Layout  # the tokens' positions
    qkv: list[Array] | None = None  # copies of GPT-2's c_attn weights; None with an adapter or quantized weights
    projections: list[dict[str, Array]] = field(
        default_factory=list
    )  # of LLaMA: copies of those of q, k, v, and of norms

    def __getitem__(self, key: Key) -> Array:
        name, block, head = (*((key,) if isinstance(key, str) else key), None, None)[:3]
        name = names.canonical(name)
        self._check_key(name, block, head)
        block = None if block is None else block % len(self.blocks)
        stored = next((x for n, b, x in self.items() if (n, b) == (name, block)), None)
        value = names.derived(self, name, block) if stored is None else stored
        assert value is not None
        if head is None:
            return value
        return value[head] if name.startswith(("∂w", "∂b")) else value[:, head]  # parameters have no batch

    def _check_key(self, name: str, block: int | None, head: int | None) -> None:
        """Raises a KeyError that says which keys there are."""
        network, in_block, in_head = self.names()
        if name in network and name not in in_block + in_head and block is not None:
            raise KeyError(f"{name!r} is not in a block; write trace[{name!r}]")
        if name not in network + in_block + in_head:
            raise KeyError(
                f"no {name!r}; of the network: {' '.join(network)}; of a block: {' '.join(in_block)}; "
                f"of a head: {' '.join(in_head)}. In ASCII: {names.ASCII}"
            )
        if name not in network and block is None:
            raise KeyError(f"{name!r} is in a block; write trace[{name!r}, 0] for the first")
        if block is not None and not -len(self.blocks) <= block < len(self.blocks):
            raise KeyError(f"no block {block}; the network has {len(self.blocks)}, from 0 to {len(self.blocks) - 1}")
        if head is None:
            return
        if name not in in_head:
            raise KeyError(f"{name!r} has no heads; write trace[{name!r}, {block}]; with heads: {' '.join(in_head)}")
        n = names.head_count(self, name)
        if not -n <= head < n:
            raise KeyError(f"no head {head}; {name!r} has {n}, from 0 to {n - 1}")

    def names(self) -> tuple[list[str], list[str], list[str]]:
        """The names of the network's, a block's and a head's arrays."""
        listed = [(name, block) for name, block, _ in self.items()]
        in_head = names.head_names(self)
        network = [name for name, block in listed if block is None] + names.network_names(self)
        in_block = [name for name, block in listed if block == 0 and name not in in_head]
        return network, in_block + names.block_names(self), in_head

    def keys(self) -> list[Key]:
        """Every key of the trace."""
        network, in_block, in_head = self.names()
        return [*network, *((name, b) for b in range(len(self.blocks)) for name in in_block + in_head)]

    @property
    def token_losses(self) -> Array:
        """ℓ, each token's loss, (B, T): 0 without a target."""
        logits, targets = rows(self.a[12]), self.targets.reshape(-1)  # (N, V), (N,)
        counts = targets != IGNORE
        picked = logits[arange(len(logits), logits), targets * counts]
        return ((log_sum_exp(logits) - picked) * counts).reshape(self.targets.shape)  # eq CE.1

    def __repr__(self) -> str:
        return trace_text(self)

    def _repr_html_(self) -> str:
        return trace_html(self)

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
IN_A_LLAMA_BLOCK = {
    "input_layernorm": ["a_2"],
    "self_attn.q_proj": ["q_lin"],
    "self_attn.k_proj": ["k_lin"],
    "self_attn.q_norm": ["q_norm"],
    "self_attn.k_norm": ["k_norm"],
    "self_attn.q": ["q"],
    "self_attn.k": ["k"],
    "self_attn.v": ["v"],
    "self_attn": ["a_3"],
    "self_attn.o_proj": ["a_4"],
    "self_attn.o_proj + skip": ["a_5"],
    "post_attention_layernorm": ["a_6"],
    "mlp.gate_proj": ["a_g"],
    "mlp.up_proj": ["a_u"],
    "mlp.act": ["a_8"],
    "mlp.down_proj": ["a_9"],
    "mlp.down_proj + skip": ["a_10"],
    "d mlp.down_proj": ["Δ_8"],
    "d mlp.act": ["Δ_7"],  # of both branches, a pair
    "d mlp.up_proj": ["Δ_6^u"],
    "d mlp.gate_proj": ["Δ_6^g"],
    "d post_attention_layernorm": ["Δ_5", "Δ_4"],
    "d self_attn.o_proj": ["Δ_3"],
    "d self_attn.k": ["dk"],
    "d self_attn.v_proj": ["Δ_2^v"],
    "d self_attn.k_proj": ["Δ_2^k"],
    "d self_attn.q_proj": ["Δ_2^q"],
    "d input_layernorm": ["Δ_1"],
}
BLOCKS = {"transformer.h.": IN_A_BLOCK, "model.layers.": IN_A_LLAMA_BLOCK}
IN_THE_NETWORK = {
    "transformer.wte.weight": "a_tok",
    "transformer.wpe.weight": "a_pos",
    "transformer.ln_f": "a_11",
    "lm_head": "a_12",
    "d lm_head out": "Δ_12",
    "d lm_head": "Δ_11",
    "model.embed_tokens.weight": "a_tok",
    "model.norm": "a_11",
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
        for prefix, layers in BLOCKS.items():
            before, found, rest = step.partition(prefix)
            b, _, layer = rest.partition(".")
            for name in layers.get(before + layer, ()) if found else ():
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
    config: Config,
    params: dict[str, Array],
    loss: float,
    grads: dict[str, Array],
    layout: Layout,
    targets: Array,
    input_gradient: bool,
    adapted: bool,
) -> Trace:
    """Builds a `Trace` from collected activations, and computes the arrays inside each head from the formulas."""
    network: dict[str, Any] = recorder.network
    steps: list[int | str] = list(range(1, 11))
    if isinstance(config, LlamaConfig):
        steps[6:7] = ["g", "u"]
    starts = [_start(layout, config, b) for b in range(len(recorder.blocks))]
    blocks = []
    for b, n in enumerate(recorder.blocks):
        if isinstance(config, LlamaConfig):
            n["Δ_g"], n["Δ_u"] = n["Δ_7"]
            n["Δ_6"] = n["Δ_6^u"] + n["Δ_6^g"]  # eq LLAMA.1
            n["Δ_2"] = n["Δ_2^v"] + n["Δ_2^k"] + n["Δ_2^q"]  # eq LLAMA.3
        a, delta = ({i: n[f"{x}_{i}"] for i in steps} for x in ("a", "Δ"))
        rho = attention_weights(n["q"], _of_query_heads(n["k"], config), config.causal, starts[b])
        d3 = split_heads(delta[3], config.n_head)  # (B, H, T, d_h)
        values = namespace(d3).swapaxes(_of_query_heads(n["v"], config), -1, -2)  # (B, H, d_h, T)
        delta_causal = softmax_backward(d3 @ values, rho)  # eq 25
        before_rope: dict[str, Array] = {name: n[name] for name in ("q_lin", "k_lin", "q_norm", "k_norm") if name in n}
        blocks.append(BlockTrace(a, delta, n["q"], n["k"], n["v"], rho, delta_causal, n["dk"], before_rope))
    positions: dict[int | str, Array] = {"pos": network["a_pos"]} if "a_pos" in network else {}
    trace = Trace(
        loss=loss,
        a={0: tokens, "tok": network["a_tok"], **positions, 11: network["a_11"], 12: network["a_12"]},
        delta={12: network["Δ_12"], 11: network["Δ_11"]},
        blocks=blocks,
        grads=grads,
        config=config,
        targets=targets,
        starts=starts,
        layout=layout,
    )
    if isinstance(config, LlamaConfig):
        trace.projections = [_projections(params, b, adapted) for b in range(len(blocks))]
    elif not adapted:
        layers = [params[f"transformer.h.{b}.attn.c_attn.weight"] for b in range(len(blocks))]
        if not any(isinstance(w, Quantized) for w in layers):
            trace.qkv = [w + 0 for w in layers]  # copies: training changes the weights in place
    trace.a["pred"] = softmax(network["a_12"])
    if input_gradient:
        trace.delta[0] = embedding_input_gradient(blocks[0].delta[1], params[token_table(config)])  # eq EMB.1
    return trace


def _projections(params: dict[str, Array], b: int, adapted: bool) -> dict[str, Array]:
    """Copies of a LLaMA block's weights of q, k and v, if they are plain arrays, and of Qwen3's norms of q and k."""
    layers = {x: f"model.layers.{b}.self_attn.{x}_proj.weight" for x in ("" if adapted else "qkv")}
    layers |= {f"{x}_norm": f"model.layers.{b}.self_attn.{x}_norm.weight" for x in "qk"}
    found = {name: params[layer] for name, layer in layers.items() if layer in params}
    return {name: w + 0 for name, w in found.items() if not isinstance(w, Quantized)}


def _of_query_heads(x: Array, config: Config) -> Array:
    """The keys or values (B, Hkv, T, D) that each query head reads, (B, H, T, D)."""
    heads = [h // (config.n_head // config.n_kv_head) for h in range(config.n_head)]
    return x[:, heads]


def _start(layout: Layout, config: Config, b: int) -> Array | None:
    """The first token that each token of a block may attend to, (B, 1, T); None: the first of all."""
    windowed = isinstance(config, LlamaConfig) and config.window(b) is not None and layout.window_start is not None
    start = layout.window_start if windowed else layout.start
    return None if start is None else start[:, None]
