"""The arrays inside LLaMA's heads that a trace computes when asked for: before RoPE, and back to the head's input.

Keys and values have one array per key/value head, queries one per query head.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from onfoot.arrays import Array, namespace, to_numpy
from onfoot.models.llama import rotations
from onfoot.ops.multi_head import split_heads
from onfoot.ops.rms_norm import rms_norm_backward, rms_norm_forward
from onfoot.ops.rope import turn

if TYPE_CHECKING:
    from onfoot.models.trace import Trace

# Names of parameters of a block by the names of their gradients, and of those outside the blocks.
PARAMETERS = {
    "1": "input_layernorm", "q^norm": "self_attn.q_norm", "k^norm": "self_attn.k_norm", "o": "self_attn.o_proj",
    "5": "post_attention_layernorm", "g": "mlp.gate_proj", "u": "mlp.up_proj", "d": "mlp.down_proj",
}  # fmt: skip
NETWORK_PARAMETERS = {
    "∂w_10": "model.norm.weight",
    "∂w_11": "lm_head.weight",
    "∂w_tok": "model.embed_tokens.weight",
}


def head_names(t: Trace) -> list[str]:
    """The names that have one array per head."""
    before = [f"{x}_{kind}" for kind in (("lin", "norm") if t.config.qk_norm else ("lin",)) for x in "qk"]
    through = [f"Δ_{x}" for x in "qkv" if x in t.projections[0]]
    gradients = [f"∂{p}_{x}" for x in "qkv" for p in "wb" if _parameter(p, x, 0) in t.grads]
    return [*before, *(f"∂{name}" for name in before), *through, *gradients]


def of_heads(t: Trace, name: str, b: int) -> Array:
    """The array of that name of all heads: (B, heads, T, ...), or (heads, ...) of a gradient of a parameter."""
    gradient = re.fullmatch(r"∂([wb])_([qkv])", name)
    if gradient:
        return _of_parameter(t, t.grads[_parameter(gradient[1], gradient[2], b)], gradient[2])
    if name.startswith("Δ_"):
        return _through(t, name[-1], b)
    if not name.startswith("∂"):
        return _before_rope(t, name, b)
    x, _, kind = name.removeprefix("∂").partition("_")
    rotated_back = _rotated_back(t, t[f"∂{x}", b])  # eq ROPE.5
    if kind == "norm" or not t.config.qk_norm:
        return rotated_back
    _, saved = rms_norm_forward(t[f"{x}_lin", b], t.projections[b][f"{x}_norm"], t.config.rms_norm_eps)
    return rms_norm_backward(rotated_back, saved)[0]  # eq LLAMA.5


def _parameter(p: str, x: str, b: int) -> str:
    return f"model.layers.{b}.self_attn.{x}_proj.{'weight' if p == 'w' else 'bias'}"


def _heads(t: Trace, x: str) -> int:
    return t.config.n_head if x == "q" else t.config.n_kv_head


def _of_parameter(t: Trace, value: Array, x: str) -> Array:
    """A projection's (out, in) weight or (out,) bias by head: (heads, in, D) as in the formulas, or (heads, D)."""
    parts = value.reshape(_heads(t, x), -1, *value.shape[1:])
    return namespace(parts).swapaxes(parts, -1, -2) if value.ndim == 2 else parts


def _before_rope(t: Trace, name: str, b: int) -> Array:
    """q_lin, k_lin, q_norm or k_norm, which the pass has with the heads side by side."""
    value = t.blocks[b].before_rope[name]  # (B, T, H D), or (B, T, H, D) of a norm
    return split_heads(value.reshape(*value.shape[:2], -1), _heads(t, name[0]))  # (B, H, T, D)


def _rotated_back(t: Trace, x: Array) -> Array:
    """x (B, H, T, D) rotated back by the positions of its tokens."""
    config, positions = t.config, to_numpy(t.layout.positions)  # (T,) or (B, T)
    limit = t.layout.limit or int(positions.max()) + 1
    tables = rotations(config.rope_theta, config.key_width, config.rope_scaling, limit, "float64")
    cos, sin = (namespace(x).asarray(table[positions], dtype=x.dtype) for table in tables)
    if cos.ndim == 3:  # each sequence has its own positions
        cos, sin = cos[:, None], sin[:, None]
    return turn(x, cos, -sin, False)


def _through(t: Trace, x: str, b: int) -> Array:
    """What reaches a_2 through the queries, keys or values of each head, (B, heads, T, C)."""
    signal = t[f"∂{x}" if x == "v" else f"∂{x}_lin", b]  # (B, heads, T, D)
    weight = _of_parameter(t, t.projections[b][x], x)  # (heads, C, D)
    return signal @ namespace(weight).swapaxes(weight, -1, -2)  # eq FC.2
