"""LLaMA and its relatives SmolLM2, Mistral, Qwen2 and Qwen3, written once against an engine.

Differences from GPT-2: RMS norm instead of layer norm, rotary position embedding (RoPE) instead of a table,
grouped-query attention, and a gated MLP (SwiGLU). Mistral's tokens attend to a sliding window; Qwen3 has an RMS norm of
each head's queries and keys. The steps are numbered as in the GPT-2 network: a_1 is the input of a block, a_5 the
residual stream after attention, a_10 its output.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.config import LlamaConfig
from onfoot.models.head import head_backward, head_forward, loss_backward, loss_forward
from onfoot.models.layout import Layout
from onfoot.models.llama_params import HEAD, TOKEN_TABLE
from onfoot.models.run import Run
from onfoot.ops.multi_head import merge_heads, split_heads
from onfoot.ops.rope import angles, frequencies

__all__ = [
    "block_backward",
    "block_forward",
    "features_backward",
    "features_forward",
    "head_backward",
    "head_forward",
    "loss_backward",
    "loss_forward",
]


class Rotary(NamedTuple):
    """The rotations of the tokens' positions, and the first token that each may attend to."""

    cos: Array  # (T, D/2) or (B, 1, T, D/2)
    sin: Array
    start: Array | None  # (B, T)
    window_start: Array | None  # (B, T), in layers with a sliding window


def rotary(run: Run, config: LlamaConfig, layout: Layout) -> Rotary:
    """The rotations of the tokens' positions, the same for all blocks and heads."""
    limit = layout.limit or int(layout.positions.max()) + 1
    dtype, window = run.policy.dtype, config.sliding_window
    assert window is None or limit <= window or layout.window_start is not None, "the layout needs `in_window`"
    tables = rotations(config.rope_theta, config.key_width, config.rope_scaling, limit, dtype)
    cos, sin = (run.engine.embedding_forward(layout.positions, run.engine.floats(x, dtype))[0] for x in tables)
    if cos.ndim == 3:  # each sequence has its own positions
        cos, sin = cos[:, None], sin[:, None]
    return Rotary(cos, sin, layout.start, layout.start if layout.window_start is None else layout.window_start)


@lru_cache(maxsize=8)
def rotations(theta: float, width: int, scaling: Any, limit: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of all positions below a limit, (limit, D/2)."""
    cos, sin = angles(np.arange(limit), frequencies(theta, width, scaling, limit))
    return np.ascontiguousarray(cos, dtype), np.ascontiguousarray(sin, dtype)


def head_norm(run: Run, config: LlamaConfig, layer: str, x: Array) -> tuple[Array, Any]:
    """Qwen3's RMS norm of each head's queries or keys, x (B, T, H D); the others have none."""
    if not config.qk_norm:
        return x, None
    y, saved = run.rms_norm(layer, x.reshape(*x.shape[:2], -1, config.key_width), config.rms_norm_eps)  # (B, T, H, D)
    return y.reshape(*x.shape), saved  # eq LLAMA.5


def head_norm_backward(run: Run, config: LlamaConfig, layer: str, dy: Array, saved: Any) -> Array:
    """The gradient of x; that of the norm's weight is summed over tokens and heads."""
    if not config.qk_norm:
        return dy
    dx = run.rms_norm_backward(layer, dy.reshape(*dy.shape[:2], -1, config.key_width), saved)
    return dx.reshape(*dy.shape)


def block_forward(run: Run, config: LlamaConfig, b: int, a1: Array, rope: Rotary) -> tuple[Array, Any]:
    """a_1 -> a_10: attention, then the gated MLP, each after an RMS norm and with a skip connection."""
    eng, name, eps = run.engine, f"model.layers.{b}", config.rms_norm_eps
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"

    a2, s_norm1 = run.rms_norm(f"{name}.input_layernorm", a1, eps)
    q, s_q = run.linear(f"{attn}.q_proj", a2)  # (B, T, H D)
    k, s_k = run.linear(f"{attn}.k_proj", a2)  # (B, T, Hkv D)
    v, s_v = run.linear(f"{attn}.v_proj", a2)  # (B, T, Hkv D)
    q, s_norm_q = head_norm(run, config, f"{attn}.q_norm", q)
    k, s_norm_k = head_norm(run, config, f"{attn}.k_norm", k)
    q, s_turn_q = eng.rope_forward(split_heads(q, config.n_head), rope.cos, rope.sin)  # (B, H, T, D)
    k, s_turn_k = eng.rope_forward(split_heads(k, config.n_kv_head), rope.cos, rope.sin)  # (B, Hkv, T, D)
    v = split_heads(v, config.n_kv_head)
    start = rope.start if config.window(b) is None else rope.window_start
    a3, s_attention = run.attention(attn, q, k, v, True, start, config.attention_dropout)
    a5, s_o = run.linear_skip(f"{attn}.o_proj", a3, a1)  # a_5 = a_1 + a_4

    a6, s_norm2 = run.rms_norm(f"{name}.post_attention_layernorm", a5, eps)
    gate, s_gate = run.linear(f"{mlp}.gate_proj", a6)  # (B, T, inner)
    up, s_up = run.linear(f"{mlp}.up_proj", a6)  # (B, T, inner)
    a8, s_glu = run.activation(f"{mlp}.act", "swiglu", gate, up)
    a10, s_down = run.linear_skip(f"{mlp}.down_proj", a8, a5)  # a_10 = a_5 + a_9

    heads = s_q, s_k, s_v, s_norm_q, s_norm_k, s_turn_q, s_turn_k, s_attention
    return a10, (s_norm1, heads, s_o, s_norm2, s_gate, s_up, s_glu, s_down)


def block_backward(run: Run, config: LlamaConfig, b: int, d10: Array, saved: Any) -> Array:
    """Δ_10 -> Δ_1, and the gradients of the block's parameters."""
    eng, name = run.engine, f"model.layers.{b}"
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    s_norm1, heads, s_o, s_norm2, s_gate, s_up, s_glu, s_down = saved
    s_q, s_k, s_v, s_norm_q, s_norm_k, s_turn_q, s_turn_k, s_attention = heads

    d8 = run.linear_skip_backward(f"{mlp}.down_proj", d10, s_down)  # Δ_9 = Δ_10
    dgate, dup = run.activation_backward(f"{mlp}.act", "swiglu", d8, s_glu)
    d6 = run.linear_backward(f"{mlp}.up_proj", dup, s_up)
    d6 = eng.add(d6, run.linear_backward(f"{mlp}.gate_proj", dgate, s_gate))  # eq LLAMA.1: both branches read a_6
    d5 = run.rms_norm_backward(f"{name}.post_attention_layernorm", d6, s_norm2, skip_gradient=d10)  # eq LLAMA.2

    d3 = run.linear_skip_backward(f"{attn}.o_proj", d5, s_o)  # Δ_4 = Δ_5
    dq, dk, dv = run.attention_backward(attn, d3, s_attention)
    dq, dk = merge_heads(eng.rope_backward(dq, s_turn_q)), merge_heads(eng.rope_backward(dk, s_turn_k))
    dq = head_norm_backward(run, config, f"{attn}.q_norm", dq, s_norm_q)
    dk = head_norm_backward(run, config, f"{attn}.k_norm", dk, s_norm_k)
    d2 = run.linear_backward(f"{attn}.v_proj", merge_heads(dv), s_v)
    d2 = eng.add(d2, run.linear_backward(f"{attn}.k_proj", dk, s_k))
    d2 = eng.add(d2, run.linear_backward(f"{attn}.q_proj", dq, s_q))  # eq LLAMA.3
    return run.rms_norm_backward(f"{name}.input_layernorm", d2, s_norm1, skip_gradient=d5)  # eq LLAMA.4


def features_forward(run: Run, config: LlamaConfig, tokens: Array, layout: Layout) -> tuple[Array, Any]:
    """a_0 -> a_11: the features that the logits are computed from, (B, T, C)."""
    x, s_tok = run.embedding(TOKEN_TABLE, tokens)
    rope = rotary(run, config, layout)
    blocks = []
    for b in range(config.n_layer):
        x, saved = run.block(block_forward, config, b, x, rope)
        blocks.append(saved)
    a11, s_norm = run.rms_norm("model.norm", x, config.rms_norm_eps)
    return a11, (s_tok, blocks, s_norm)


def features_backward(run: Run, config: LlamaConfig, d11: Array, saved: Any) -> None:
    """Δ_11 -> Δ_1, down to the lowest layer that trains."""
    s_tok, blocks, s_norm = saved
    if not run.gradients.needs_gradient_below(HEAD):
        return
    d = run.rms_norm_backward("model.norm", d11, s_norm)
    for b in reversed(range(config.n_layer)):
        above = "model.norm" if b == config.n_layer - 1 else f"model.layers.{b + 1}.input_layernorm"
        if not run.gradients.needs_gradient_below(above):
            return
        d = run.block_backward(block_backward, config, b, d, blocks.pop())  # frees its activations
    if run.gradients.needs_gradient_below("model.layers.0.input_layernorm"):
        run.embedding_backward(TOKEN_TABLE, d, s_tok)  # eq 3
