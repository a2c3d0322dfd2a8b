"""GPT-2, the network of the paper's Table 2 with any number of blocks, written once against an engine.

The steps and their numbers are the paper's: a_1 is the input of a block, a_10 its output, a_12 the logits; Δ_i is the
gradient of the loss with respect to a_i. `run.note` hears each of them, for `trace`; an a_i as soon as it is made,
before anything is computed from it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from onfoot.arrays import Array, namespace
from onfoot.config import GPT2Config
from onfoot.models.head import head_backward, head_forward, loss_backward, loss_forward
from onfoot.models.layout import Layout, merge_heads, split_heads
from onfoot.models.params import HEAD, POSITION_TABLE, TOKEN_TABLE, shapes
from onfoot.models.run import Run
from onfoot.ops.activation import ACTIVATIONS

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
    "merge_heads",
    "pass_in_one",
    "split_heads",
]


def block_forward(
    run: Run, config: GPT2Config, b: int, a1: Array, layout: Layout, cache: Any = None
) -> tuple[Array, Any]:
    """a_1 -> a_10: attention, then expand-and-contract, each behind a layer norm and beside a skip."""
    eng, name, eps = run.engine, f"transformer.h.{b}", config.layer_norm_epsilon
    activation_forward = getattr(eng, f"{ACTIVATIONS[config.activation_function]}_forward")

    run.note(f"{b}.a_1", a1)
    a2, s_norm1 = run.layer_norm(f"{name}.ln_1", a1, eps)
    run.note(f"{b}.a_2", a2)
    qkv, s_qkv = run.linear(
        f"{name}.attn.c_attn", a2, lambda: run.layer_norm(f"{name}.ln_1", a1, eps)[0]
    )  # (B, T, H (2 d_ρ + d_h)): q | k | v
    a3, s_attention = _heads_forward(run, config, b, qkv, layout, cache)  # (B, T, H d_h)
    run.note(f"{b}.a_3", a3)
    a5, s_proj = run.linear_skip(f"{name}.attn.c_proj", a3, a1, config.resid_pdrop, name=f"{b}.a_4")  # a_1 + a_4
    run.note(f"{b}.a_5", a5)

    a6, s_norm2 = run.layer_norm(f"{name}.ln_2", a5, eps)
    run.note(f"{b}.a_6", a6)
    a7, s_expand = run.linear(
        f"{name}.mlp.c_fc", a6, lambda: run.layer_norm(f"{name}.ln_2", a5, eps)[0]
    )  # (B, T, inner)
    run.note(f"{b}.a_7", a7)
    a8, s_activation = activation_forward(a7)
    run.note(f"{b}.a_8", a8)
    a10, s_contract = run.linear_skip(  # a_5 + a_9
        f"{name}.mlp.c_proj", a8, a5, config.resid_pdrop, lambda: activation_forward(a7)[0], name=f"{b}.a_9"
    )
    run.note(f"{b}.a_10", a10)

    saved = (s_norm1, s_qkv, s_attention, s_proj, s_norm2, s_expand, s_activation, s_contract)
    return a10, saved if run.keep_saved else None


def block_backward(run: Run, config: GPT2Config, b: int, d10: Array, saved: Any) -> Array | None:
    """Δ_10 -> Δ_1, and the gradients of the block's parameters; None as soon as nothing below trains."""
    eng, name = run.engine, f"transformer.h.{b}"
    s_norm1, s_qkv, s_attention, s_proj, s_norm2, s_expand, s_activation, s_contract = saved
    activation_backward = getattr(eng, f"{ACTIVATIONS[config.activation_function]}_backward")

    d8 = run.linear_skip_backward(f"{name}.mlp.c_proj", d10, s_contract)  # Δ_9 = Δ_10: a sum sends it to both terms
    if not run.trains_below(f"{name}.mlp.c_proj"):
        return None
    d7 = activation_backward(d8, s_activation)
    d6 = run.linear_backward(f"{name}.mlp.c_fc", d7, s_expand)
    if not run.trains_below(f"{name}.mlp.c_fc"):
        return None
    d5 = run.layer_norm_backward(f"{name}.ln_2", d6, s_norm2, past=d10)  # eq NET.1

    if not run.trains_below(f"{name}.ln_2"):
        return None
    d3 = run.linear_skip_backward(f"{name}.attn.c_proj", d5, s_proj)  # Δ_4 = Δ_5
    if not run.trains_below(f"{name}.attn.c_proj"):
        return None
    dqkv = _heads_backward(run, config, b, d3, s_attention)
    d2 = run.linear_backward(f"{name}.attn.c_attn", dqkv, s_qkv, dead=_dead(config))
    if not run.trains_below(f"{name}.attn.c_attn"):
        return None
    d1 = run.layer_norm_backward(f"{name}.ln_1", d2, s_norm1, past=d5)  # eq NET.2

    for i, d in enumerate((d1, d2, d3, d5, d5, d6, d7, d8, d10, d10), start=1):
        run.note(f"{b}.Δ_{i}", d)
    return d1


def _heads_forward(run: Run, config: GPT2Config, b: int, qkv: Array, layout: Layout, cache: Any) -> tuple[Array, Any]:
    """q | k | v -> a_3: all heads' attention, side by side."""
    eng, heads, qk = run.engine, config.n_head, config.n_head * config.key_width
    start = None if layout.start is None else layout.start[:, None]  # (B, 1, T): the same for all heads
    n_k = qkv.shape[1] + (0 if cache is None else cache.length)
    shape = (qkv.shape[0], heads, qkv.shape[1], n_k)
    keep = run.dropout_keep(f"transformer.h.{b}.attn", shape, config.attn_pdrop)
    if eng.has("self_attention_forward") and cache is None and not run.traced:
        return eng.self_attention_forward(qkv, heads, config.key_width, config.causal, start, keep)
    q = split_heads(qkv[..., :qk], heads)  # (B, H, T, d_ρ)
    k = split_heads(qkv[..., qk : 2 * qk], heads)  # (B, H, T, d_ρ)
    v = split_heads(qkv[..., 2 * qk :], heads)  # (B, H, T, d_h)
    run.note(f"{b}.q", q), run.note(f"{b}.k", k), run.note(f"{b}.v", v)
    if cache is not None:
        k, v = cache.extend(b, k, v)
    heads_out, saved = eng.attention_forward(q, k, v, config.causal, start, keep)
    return merge_heads(heads_out), saved


def _heads_backward(run: Run, config: GPT2Config, b: int, d3: Array, saved: Any) -> Array:
    """Δ_3 -> the gradient of q | k | v."""
    if run.engine.has("self_attention_backward") and not run.traced:
        return run.engine.self_attention_backward(d3, saved)
    dq, dk, dv = run.engine.attention_backward(split_heads(d3, config.n_head), saved)
    run.note(f"{b}.dk", dk)
    return namespace(d3).concatenate([merge_heads(dq), merge_heads(dk), merge_heads(dv)], axis=-1)


def _dead(config: GPT2Config) -> slice:
    """The keys' biases among all: they shift every score of a row alike, so their gradient is 0."""
    qk = config.n_head * config.key_width
    return slice(qk, 2 * qk)  # eq 29


def features_forward(
    run: Run, config: GPT2Config, tokens: Array, layout: Layout, cache: Any = None
) -> tuple[Array, Any]:
    """a_0 -> a_11: the features that the logits are read from, (B, T, C)."""
    a_tok, s_tok = run.engine.embedding_forward(tokens, run.params[TOKEN_TABLE])
    a_pos, s_pos = run.engine.embedding_forward(layout.positions, run.params[POSITION_TABLE])
    run.note("a_0", tokens), run.note("a_tok", a_tok), run.note("a_pos", a_pos)
    x = run.engine.add(a_tok, a_pos)  # a_1 = a_tok + a_pos
    x, s_drop = run.dropout("transformer.drop", x, config.embd_pdrop)
    blocks = []
    decoder = _decoder(run, config, layout, cache)
    if decoder is not None:
        x = decoder(x, cache.length)
    else:
        for b in range(config.n_layer):
            x, saved = run.block(block_forward, config, b, x, layout, cache)
            blocks.append(saved)
    a11, s_norm = run.layer_norm("transformer.ln_f", x, config.layer_norm_epsilon)
    run.note("a_11", a11)
    return a11, (s_tok, s_pos, s_drop, blocks, s_norm) if run.keep_saved else None


def _decoder(run: Run, config: GPT2Config, layout: Layout, cache: Any) -> Any:
    """What takes one more token of each sequence through the blocks, where an engine has it."""
    if not run.decodes("gpt2_decoder", layout, cache):
        return None
    if cache.decoder is None:
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        layers = [[run.parameters(f"transformer.h.{b}.{name}") for name in names] for b in range(config.n_layer)]
        activation, eps = ACTIVATIONS[config.activation_function], config.layer_norm_epsilon
        made = run.engine.gpt2_decoder(layers, cache.blocks, layout.start, eps, activation)
        cache.decoder = made or False  # if it is refused, it is not asked for again
    return cache.decoder or None


def features_backward(run: Run, config: GPT2Config, d11: Array, saved: Any) -> None:
    """Δ_11 -> Δ_1, down to the lowest layer that trains."""
    s_tok, s_pos, s_drop, blocks, s_norm = saved
    run.note("Δ_11", d11)
    if not run.trains_below(HEAD):
        return
    d = run.layer_norm_backward("transformer.ln_f", d11, s_norm)
    for b in reversed(range(config.n_layer)):
        if not run.trains_below("transformer.ln_f" if b == config.n_layer - 1 else f"transformer.h.{b + 1}.ln_1"):
            return
        saved_block, blocks[b] = blocks[b], None  # its activations are not needed again
        below = run.block_backward(block_backward, config, b, d, saved_block)
        if below is None:
            return
        d = below
    if not run.trains_below("transformer.h.0.ln_1"):
        return
    d = run.dropout_backward(d, s_drop)
    run.embedding_backward(TOKEN_TABLE, d, s_tok)  # eq 3
    d_pos = d if s_pos.ids.ndim == 2 else run.engine.sum_first(d)  # every sequence of the batch shares the positions
    run.embedding_backward(POSITION_TABLE, d_pos, s_pos)  # eq 3


def pass_in_one(
    run: Run, config: GPT2Config, tokens: Array, targets: Array, layout: Layout, divisor: float
) -> float | None:
    """The loss, and the gradients of all parameters, where an engine does all that in one; None where it does not.

    That is for small models whose parameters all train, with nothing to be noted, dropped or computed again, and for
    sequences that each begin at the first position.
    """
    if not run.engine.has("gpt2_pass") or run.traced or run.recompute or run.adapter is not None:
        return None
    drops = run.dropout_seed is not None and (config.attn_pdrop or config.resid_pdrop or config.embd_pdrop)
    plain = layout.start is None and not drops and ACTIVATIONS[config.activation_function] == "gelu_tanh"
    names = _all_params(config)
    if not plain or config.lm_head_bias or not run.trainable.issuperset(names):
        return None
    params = [run.params[name] for name in names]
    if not run.engine.gpt2_pass_suits(tokens, params):
        return None
    eps = config.layer_norm_epsilon
    loss, grads = run.engine.gpt2_pass(tokens, targets, divisor, params, config.n_head, eps, config.causal)
    run.hear(loss)
    run.add_all(names, grads)
    return float(loss)


@lru_cache(maxsize=8)
def _all_params(config: GPT2Config) -> tuple[str, ...]:
    """The names of all parameters, in the order of the forward pass."""
    return tuple(shapes(config))
