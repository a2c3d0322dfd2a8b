"""GPT-2, the network of the paper's Table 2 with any number of blocks, written once against an engine.

The steps and their numbers are the paper's: a_1 is the input of a block, a_10 its output, a_12 the logits; Δ_i is the
gradient of the loss with respect to a_i. What is not in the table (dropout, adapters, recomputation, tracing) is done
by the `Run`.
"""

from __future__ import annotations

from typing import Any

from onfoot.arrays import Array
from onfoot.config import GPT2Config
from onfoot.models.head import head_backward, head_forward, loss_backward, loss_forward
from onfoot.models.layout import Layout
from onfoot.models.params import HEAD, POSITION_TABLE, TOKEN_TABLE
from onfoot.models.run import Run
from onfoot.ops.activation import ACTIVATIONS
from onfoot.ops.multi_head import merge_heads, split_heads

__all__ = [
    "Layout",
    "block_backward",
    "block_forward",
    "features_backward",
    "features_forward",
    "head_backward",
    "head_forward",
    "loss_backward",
    "loss_forward",
]


def block_forward(run: Run, config: GPT2Config, b: int, a1: Array, layout: Layout) -> tuple[Array, Any]:
    """a_1 -> a_10: attention, then the MLP, each after a layer norm and with a skip connection."""
    name, heads, eps, p = f"transformer.h.{b}", config.n_head, config.layer_norm_epsilon, config.resid_pdrop
    qk = heads * config.key_width

    a2, s_norm1 = run.layer_norm(f"{name}.ln_1", a1, eps)
    qkv, s_qkv = run.linear(f"{name}.attn.c_attn", a2)  # (B, T, H (2 d_ρ + d_h)): q | k | v
    q = split_heads(qkv[..., :qk], heads)  # (B, H, T, d_ρ)
    k = split_heads(qkv[..., qk : 2 * qk], heads)  # (B, H, T, d_ρ)
    v = split_heads(qkv[..., 2 * qk :], heads)  # (B, H, T, d_h)
    a3, s_attention = run.attention(f"{name}.attn", q, k, v, config.causal, layout.start, config.attn_pdrop)
    a5, s_proj = run.linear_skip(f"{name}.attn.c_proj", a3, a1, p)  # a_5 = a_1 + a_4

    a6, s_norm2 = run.layer_norm(f"{name}.ln_2", a5, eps)
    a7, s_expand = run.linear(f"{name}.mlp.c_fc", a6)  # (B, T, inner)
    a8, s_activation = run.activation(f"{name}.mlp.act", ACTIVATIONS[config.activation_function], a7)
    a10, s_contract = run.linear_skip(f"{name}.mlp.c_proj", a8, a5, p)  # a_10 = a_5 + a_9

    return a10, (s_norm1, s_qkv, s_attention, s_proj, s_norm2, s_expand, s_activation, s_contract)


def block_backward(run: Run, config: GPT2Config, b: int, d10: Array, saved: Any) -> Array:
    """Δ_10 -> Δ_1, and the gradients of the block's parameters."""
    name, qk = f"transformer.h.{b}", config.n_head * config.key_width
    s_norm1, s_qkv, s_attention, s_proj, s_norm2, s_expand, s_activation, s_contract = saved

    d8 = run.linear_skip_backward(f"{name}.mlp.c_proj", d10, s_contract)  # Δ_9 = Δ_10: a sum passes it to both terms
    d7 = run.activation_backward(f"{name}.mlp.act", ACTIVATIONS[config.activation_function], d8, s_activation)
    d6 = run.linear_backward(f"{name}.mlp.c_fc", d7, s_expand)
    d5 = run.layer_norm_backward(f"{name}.ln_2", d6, s_norm2, skip_gradient=d10)  # eq NET.1

    d3 = run.linear_skip_backward(f"{name}.attn.c_proj", d5, s_proj)  # Δ_4 = Δ_5
    dq, dk, dv = run.attention_backward(f"{name}.attn", d3, s_attention)
    dqkv = run.side_by_side(merge_heads(dq), merge_heads(dk), merge_heads(dv))
    d2 = run.linear_backward(f"{name}.attn.c_attn", dqkv, s_qkv, dead=slice(qk, 2 * qk))  # eq 29: b_k has no effect
    return run.layer_norm_backward(f"{name}.ln_1", d2, s_norm1, skip_gradient=d5)  # eq NET.2


def features_forward(run: Run, config: GPT2Config, tokens: Array, layout: Layout) -> tuple[Array, Any]:
    """a_0 -> a_11: the features that the logits are computed from, (B, T, C)."""
    a_tok, s_tok = run.embedding(TOKEN_TABLE, tokens)
    a_pos, s_pos = run.embedding(POSITION_TABLE, layout.positions)
    x = run.engine.add(a_tok, a_pos)  # a_1 = a_tok + a_pos
    x, s_drop = run.dropout("transformer.drop", x, config.embd_pdrop)
    blocks = []
    for b in range(config.n_layer):
        x, saved = run.block(block_forward, config, b, x, layout)
        blocks.append(saved)
    a11, s_norm = run.layer_norm("transformer.ln_f", x, config.layer_norm_epsilon)
    return a11, (s_tok, s_pos, layout.positions.ndim, s_drop, blocks, s_norm)


def features_backward(run: Run, config: GPT2Config, d11: Array, saved: Any) -> None:
    """Δ_11 -> Δ_1, down to the lowest layer that trains."""
    s_tok, s_pos, position_axes, s_drop, blocks, s_norm = saved
    if not run.gradients.needs_gradient_below(HEAD):
        return
    d = run.layer_norm_backward("transformer.ln_f", d11, s_norm)
    for b in reversed(range(config.n_layer)):
        if not run.gradients.needs_gradient_below(
            "transformer.ln_f" if b == config.n_layer - 1 else f"transformer.h.{b + 1}.ln_1"
        ):
            return
        d = run.block_backward(block_backward, config, b, d, blocks.pop())  # frees its activations
    if not run.gradients.needs_gradient_below("transformer.h.0.ln_1"):
        return
    d = run.dropout_backward(d, s_drop)
    run.embedding_backward(TOKEN_TABLE, d, s_tok)  # eq 3
    d_pos = d if position_axes == 2 else run.engine.sum_first(d)  # all sequences of the batch have the same positions
    run.embedding_backward(POSITION_TABLE, d_pos, s_pos)  # eq 3
