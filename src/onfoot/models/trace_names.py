"""The arrays of a trace that are computed when asked for: those inside a head, and gradients by the paper's names.

`derived(trace, name, block)` has every head's array, (B, H, ...), for a name of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from onfoot.arrays import Array, namespace
from onfoot.config import GPT2Config
from onfoot.models import trace_llama as llama
from onfoot.ops.attention import visible
from onfoot.ops.multi_head import split_heads

if TYPE_CHECKING:
    from onfoot.models.trace import Trace

ASCII = "delta_5, rho_raw, abar_1, dw_8, dq, loss_per_token"  # examples of the ASCII spellings
ALIASES = (("delta", "Δ"), ("Delta", "Δ"), ("rho", "ρ"), ("abar", "ā"))

# Names of parameters of a GPT-2 block by the paper's names of their gradients.
PARAMETERS = {
    "1": "ln_1", "3": "attn.c_proj", "5": "ln_2", "6": "mlp.c_fc", "8": "mlp.c_proj",
}  # fmt: skip
NETWORK_PARAMETERS = {
    "∂w_10": "transformer.ln_f.weight",
    "∂b_10": "transformer.ln_f.bias",
    "∂w_11": "lm_head.weight",
    "∂b_11": "lm_head.bias",
    "∂w_tok": "transformer.wte.weight",
    "∂w_pos": "transformer.wpe.weight",
}


def canonical(name: str) -> str:
    """The paper's name for a name that may be spelled in ASCII."""
    if name == "loss_per_token":
        return "ℓ"
    for ascii_, letter in ALIASES:
        name = re.sub(rf"^{ascii_}(?=$|_)", letter, name)
    name = re.sub(r"^d(?=(?:[qkv](?:_lin|_norm)?|rho|ρ)$|[wb]_)", "∂", name)
    return name.replace("∂rho", "∂ρ")


def _t(x: Array) -> Array:
    return namespace(x).swapaxes(x, -1, -2)


def _queries(t: Trace, x: Array) -> Array:
    """Keys or values (B, Hkv, T, D) as each query head reads them, (B, H, T, D)."""
    return x[:, [h // (t.config.n_head // t.config.n_kv_head) for h in range(t.config.n_head)]]


def _root(t: Trace) -> float:
    return math.sqrt(t.config.key_width)


def _masked(t: Trace, b: int) -> Array:
    scaled = derived(t, "ρ_scaled", b)
    n = scaled.shape[-1]
    mask = visible(n, n, t.config.causal, t.starts[b], scaled)
    return scaled if mask is None else namespace(scaled).where(mask, scaled, -math.inf)


def _grouped(t: Trace, x: Array) -> Array:
    """The sum over the query heads that share a key and value head: (B, H, T, D) -> (B, Hkv, T, D)."""
    group = t.config.n_head // t.config.n_kv_head
    return x if group == 1 else x.reshape(x.shape[0], t.config.n_kv_head, group, *x.shape[2:]).sum(2)


# Per block, with one array per head.
HEAD: dict[str, Callable[[Trace, int], Array]] = {
    "q": lambda t, b: t.blocks[b].q,
    "k": lambda t, b: t.blocks[b].k,
    "v": lambda t, b: t.blocks[b].v,
    "ρ_raw": lambda t, b: t.blocks[b].q @ _t(_queries(t, t.blocks[b].k)),  # eq 10
    "ρ_scaled": lambda t, b: derived(t, "ρ_raw", b) / _root(t),  # eq 12
    "ρ_causal": _masked,  # eq 13
    "ρ": lambda t, b: t.blocks[b].rho,
    "a_3^h": lambda t, b: split_heads(t.blocks[b].a[3], t.config.n_head),
    "Δ_3^h": lambda t, b: split_heads(t.blocks[b].delta[3], t.config.n_head),
    "∂ρ": lambda t, b: derived(t, "Δ_3^h", b) @ _t(_queries(t, t.blocks[b].v)),
    "Δ_causal": lambda t, b: t.blocks[b].delta_causal,
    "Δ_scaled": lambda t, b: t.blocks[b].delta_causal,  # eq 27
    "Δ_raw": lambda t, b: t.blocks[b].delta_causal / _root(t),  # eq 28
    "∂q": lambda t, b: derived(t, "Δ_raw", b) @ _queries(t, t.blocks[b].k),  # eq ATT.2
    "∂k": lambda t, b: _grouped(t, _t(derived(t, "Δ_raw", b)) @ t.blocks[b].q),  # eq ATT.3
    "∂v": lambda t, b: _grouped(t, _t(t.blocks[b].rho) @ derived(t, "Δ_3^h", b)),  # eq ATT.1
}
PARTS = ("q", "k", "v")
GPT2_HEAD = (
    *(f"Δ_{x}" for x in PARTS),
    "Δ_2^h",
    *(f"∂{p}_{x}" for x in PARTS for p in "wb"),
)


def head_names(t: Trace) -> list[str]:
    """The names that have one array per head."""
    if not isinstance(t.config, GPT2Config):
        return [*HEAD, *llama.head_names(t)]
    return [*HEAD, *(GPT2_HEAD if t.qkv is not None else ())]


def head_count(t: Trace, name: str) -> int:
    """How many heads the array of that name has: keys and values may be shared by several queries."""
    shared = re.fullmatch(r"(?:∂|Δ_|∂[wb]_)?[kv](?:_lin|_norm)?", name)
    return t.config.n_kv_head if shared else t.config.n_head


def block_names(t: Trace) -> list[str]:
    """The names of a block that are computed when asked for, and have no heads."""
    gradients = [f"∂{p}_{i}" for i in _parameters(t) for p in "wb"]
    return ["ā_1", "ā_5", *(name for name in gradients if parameter(t, name, 0) in t.grads)]


def network_names(t: Trace) -> list[str]:
    """The names outside the blocks that are computed when asked for."""
    found = [name for name, parameter_ in _network_parameters(t).items() if parameter_ in t.grads]
    return ["y_gt", "ā_10", "ℓ", "L", *found]


def parameter(t: Trace, name: str, block: int | None) -> str:
    """The parameter whose gradient has this name, or ""."""
    if block is None:
        return _network_parameters(t).get(name, "")
    found, layers = re.fullmatch(r"∂([wb])_(.+)", name), _parameters(t)
    if found is None or found[2] not in layers:
        return ""
    blocks = "transformer.h" if isinstance(t.config, GPT2Config) else "model.layers"
    return f"{blocks}.{block}.{layers[found[2]]}.{'weight' if found[1] == 'w' else 'bias'}"


def _parameters(t: Trace) -> dict[str, str]:
    return PARAMETERS if isinstance(t.config, GPT2Config) else llama.PARAMETERS


def _network_parameters(t: Trace) -> dict[str, str]:
    return NETWORK_PARAMETERS if isinstance(t.config, GPT2Config) else llama.NETWORK_PARAMETERS


def normalized(t: Trace, x: Array) -> Array:
    """x as a norm sees it before its weight: without mean and scale (GPT-2), or without scale (LLaMA)."""
    if isinstance(t.config, GPT2Config):
        x, eps = x - x.mean(axis=-1, keepdims=True), t.config.layer_norm_epsilon
    else:
        eps = t.config.rms_norm_eps
    return x / namespace(x).sqrt((x * x).mean(axis=-1, keepdims=True) + eps)  # eq 36


def _columns(t: Trace, part: str, head: int) -> slice:
    """The columns of c_attn that hold a head's q, k or v."""
    width = t.config.value_width if part == "v" else t.config.key_width
    start = {"q": 0, "k": t.config.n_head * t.config.key_width, "v": 2 * t.config.n_head * t.config.key_width}[part]
    return slice(start + head * width, start + (head + 1) * width)


def _of_gpt2_heads(t: Trace, name: str, b: int) -> Array:
    """Δ_q, Δ_2^h, ∂w_q, … of all heads: the backward pass of c_attn, head by head."""
    assert t.qkv is not None
    xp = namespace(t.blocks[b].q)
    heads = range(t.config.n_head)
    if name == "Δ_2^h":
        return derived(t, "Δ_v", b) + derived(t, "Δ_q", b) + derived(t, "Δ_k", b)
    part = name[-1]
    if name.startswith("Δ_"):
        made = derived(t, f"∂{part}", b)  # (B, H, T, D)
        return xp.stack([made[:, h] @ t.qkv[b][:, _columns(t, part, h)].T for h in heads], 1)  # (B, H, T, C)
    gradient = t.grads[f"transformer.h.{b}.attn.c_attn.{'weight' if name[1] == 'w' else 'bias'}"]
    return xp.stack([gradient[..., _columns(t, part, h)] for h in heads])  # (H, C, D)


def derived(t: Trace, name: str, block: int | None) -> Array:
    """The array of that name, computed from what the trace holds; None if there is none."""
    if block is None:
        if name == "ā_10":
            return normalized(t, t.blocks[-1].a[10])
        plain = {"y_gt": t.targets, "ℓ": t.token_losses, "L": t.loss}
        if name in plain:
            return plain[name]
        gradient = t.grads.get(parameter(t, name, None))
        return gradient.T if name == "∂w_11" and gradient is not None else gradient  # the paper's weights are (in, out)
    if name in HEAD:
        return HEAD[name](t, block)
    if name in head_names(t):
        return _of_gpt2_heads(t, name, block) if isinstance(t.config, GPT2Config) else llama.of_heads(t, name, block)
    if name in ("ā_1", "ā_5"):
        return normalized(t, t.blocks[block].a[int(name[-1])])
    gradient = t.grads.get(parameter(t, name, block))
    if gradient is None or isinstance(t.config, GPT2Config) or gradient.ndim < 2:
        return gradient
    return gradient.T  # LLaMA's files have (out, in)
