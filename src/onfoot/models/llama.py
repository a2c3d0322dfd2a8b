"""LLaMA, SmolLM2 and Qwen2, written once against an engine.

Against GPT-2: RMS norm instead of layer norm, positions by rotating queries and keys (RoPE) instead of a table, several
query heads over one head of keys and values, and an MLP with a gate (SwiGLU). The numbers of the steps are those of the
GPT-2 network: a_1 is the input of a block, a_5 what follows attention, a_10 its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.config import LlamaConfig
from onfoot.models.head import head_backward, head_forward, loss_backward, loss_forward
from onfoot.models.layout import Layout, merge_heads, split_heads
from onfoot.models.llama_params import HEAD, TOKEN_TABLE
from onfoot.models.run import Run
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
    "pass_in_one",
]


class Place(NamedTuple):
    """What every block needs to know of where the tokens stand."""

    cos: Array  # (T, D/2) or (B, 1, T, D/2)
    sin: Array
    start: Array | None  # (B, 1, T)


def place(run: Run, config: LlamaConfig, layout: Layout) -> Place:
    """The rotations of the tokens' positions, the same for all blocks and heads."""
    cos, sin = angles(to_numpy(layout.positions), frequencies(config.rope_theta, config.key_width, config.rope_scaling))
    if cos.ndim == 3:  # positions of their own for each sequence
        cos, sin = cos[:, None], sin[:, None]
    cos, sin = (run.engine.floats(np.ascontiguousarray(x), run.dtype) for x in (cos, sin))
    return Place(cos, sin, None if layout.start is None else layout.start[:, None])


def block_forward(
    run: Run, config: LlamaConfig, b: int, a1: Array, where: Place, cache: Any = None
) -> tuple[Array, Any]:
    """a_1 -> a_10: attention, then the gated MLP, each behind an RMS norm and beside a skip."""
    eng, name = run.engine, f"model.layers.{b}"
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"

    a2, s_norm1 = run.rms_norm(f"{name}.input_layernorm", a1, config.rms_norm_eps)
    q, s_q = run.linear(f"{attn}.q_proj", a2)  # (B, T, H D)
    k, s_k = run.linear(f"{attn}.k_proj", a2)  # (B, T, Hkv D)
    v, s_v = run.linear(f"{attn}.v_proj", a2)  # (B, T, Hkv D)
    q, s_turn_q = eng.rope_forward(split_heads(q, config.n_head), where.cos, where.sin)  # (B, H, T, D)
    k, s_turn_k = eng.rope_forward(split_heads(k, config.n_kv_head), where.cos, where.sin)  # (B, Hkv, T, D)
    v = split_heads(v, config.n_kv_head)
    if cache is not None:
        k, v = cache.extend(b, k, v)  # keys are kept turned: their positions do not change
    keep = run.dropout_keep(attn, (*q.shape[:-1], k.shape[-2]), config.attention_dropout)
    heads_out, s_attention = eng.grouped_query_forward(q, k, v, True, where.start, keep)
    a5, s_o = run.linear_skip(f"{attn}.o_proj", merge_heads(heads_out), a1)  # a_1 + a_4

    a6, s_norm2 = run.rms_norm(f"{name}.post_attention_layernorm", a5, config.rms_norm_eps)
    gate, s_gate = run.linear(f"{mlp}.gate_proj", a6)  # (B, T, inner)
    up, s_up = run.linear(f"{mlp}.up_proj", a6)  # (B, T, inner)
    a8, s_glu = eng.swiglu_forward(gate, up)
    a10, s_down = run.linear_skip(f"{mlp}.down_proj", a8, a5)  # a_5 + a_9

    saved = (s_norm1, s_q, s_k, s_v, s_turn_q, s_turn_k, s_attention, s_o, s_norm2, s_gate, s_up, s_glu, s_down)
    return a10, saved if run.keep_saved else None


def block_backward(run: Run, config: LlamaConfig, b: int, d10: Array, saved: Any) -> Array | None:
    """Δ_10 -> Δ_1, and the gradients of the block's parameters; None as soon as nothing below trains."""
    eng, name = run.engine, f"model.layers.{b}"
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    s_norm1, s_q, s_k, s_v, s_turn_q, s_turn_k, s_attention, s_o, s_norm2, s_gate, s_up, s_glu, s_down = saved

    d8 = run.linear_skip_backward(f"{mlp}.down_proj", d10, s_down)
    if not run.trains_below(f"{mlp}.down_proj"):
        return None
    dgate, dup = eng.swiglu_backward(d8, s_glu)
    d6 = run.linear_backward(f"{mlp}.up_proj", dup, s_up)
    if not run.trains_below(f"{mlp}.up_proj"):
        return None
    d6 = eng.add(d6, run.linear_backward(f"{mlp}.gate_proj", dgate, s_gate))  # eq LLAMA.1: both branches read a_6
    if not run.trains_below(f"{mlp}.gate_proj"):
        return None
    d5 = eng.add(d10, run.rms_norm_backward(f"{name}.post_attention_layernorm", d6, s_norm2))  # eq LLAMA.2
    if not run.trains_below(f"{name}.post_attention_layernorm"):
        return None

    d3 = run.linear_skip_backward(f"{attn}.o_proj", d5, s_o)
    if not run.trains_below(f"{attn}.o_proj"):
        return None
    dq, dk, dv = eng.grouped_query_backward(split_heads(d3, config.n_head), s_attention)
    d2 = run.linear_backward(f"{attn}.v_proj", merge_heads(dv), s_v)
    if not run.trains_below(f"{attn}.v_proj"):
        return None
    d2 = eng.add(d2, run.linear_backward(f"{attn}.k_proj", merge_heads(eng.rope_backward(dk, s_turn_k)), s_k))
    if not run.trains_below(f"{attn}.k_proj"):
        return None
    dq = merge_heads(eng.rope_backward(dq, s_turn_q))
    d2 = eng.add(d2, run.linear_backward(f"{attn}.q_proj", dq, s_q))  # eq LLAMA.3
    if not run.trains_below(f"{attn}.q_proj"):
        return None
    return eng.add(d5, run.rms_norm_backward(f"{name}.input_layernorm", d2, s_norm1))  # eq LLAMA.4


def features_forward(
    run: Run, config: LlamaConfig, tokens: Array, layout: Layout, cache: Any = None
) -> tuple[Array, Any]:
    """a_0 -> a_11: the features that the logits are read from, (B, T, C)."""
    x, s_tok = run.engine.embedding_forward(tokens, run.params[TOKEN_TABLE])
    blocks = []
    decoder = _decoder(run, config, layout, cache)
    if decoder is not None:
        x = decoder(x, cache.length)
    else:
        where = place(run, config, layout)
        for b in range(config.n_layer):
            x, saved = run.block(block_forward, config, b, x, where, cache)
            blocks.append(saved)
    a11, s_norm = run.rms_norm("model.norm", x, config.rms_norm_eps)
    return a11, (s_tok, blocks, s_norm) if run.keep_saved else None


def _decoder(run: Run, config: LlamaConfig, layout: Layout, cache: Any) -> Any:
    """What takes one more token of each sequence through the blocks, where an engine has it."""
    if not run.decodes("llama_decoder", layout, cache):
        return None
    if cache.decoder is None:
        names = (
            "input_layernorm",
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            "post_attention_layernorm",
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
        layers = [[run.parameters(f"model.layers.{b}.{name}") for name in names] for b in range(config.n_layer)]
        every = place(run, config, Layout(np.arange(cache.capacity)))
        made = run.engine.llama_decoder(layers, cache.blocks, layout.start, config.rms_norm_eps, every.cos, every.sin)
        cache.decoder = made or False  # if it is refused, it is not asked for again
    return cache.decoder or None


def features_backward(run: Run, config: LlamaConfig, d11: Array, saved: Any) -> None:
    """Δ_11 -> Δ_1, down to the lowest layer that trains."""
    s_tok, blocks, s_norm = saved
    if not run.trains_below(HEAD):
        return
    d = run.rms_norm_backward("model.norm", d11, s_norm)
    for b in reversed(range(config.n_layer)):
        if not run.trains_below("model.norm" if b == config.n_layer - 1 else f"model.layers.{b + 1}.input_layernorm"):
            return
        saved_block, blocks[b] = blocks[b], None  # its activations are not needed again
        below = run.block_backward(block_backward, config, b, d, saved_block)
        if below is None:
            return
        d = below
    if run.trains_below("model.layers.0.input_layernorm"):
        run.embedding_backward(TOKEN_TABLE, d, s_tok)  # eq 3


def pass_in_one(
    run: Run, config: LlamaConfig, tokens: Array, targets: Array, layout: Layout, divisor: float
) -> float | None:
    """No engine does a whole pass of this family in one."""
    return None
