"""Whole networks with dropout and with packed examples: every gradient against PyTorch's autograd.

The networks are written here once more with PyTorch's own functions. Dropout multiplies with the very patterns that the
model draws; packing is a mask of blocks along the diagonal, with positions that begin anew in each.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onfoot
from onfoot.models.model import Model
from onfoot.ops.dropout import dropout_pattern
from oracles import assert_close

SEED = 7
Params = dict[str, torch.Tensor]


class Pass:
    """What one pass of the oracle needs: the attention mask, positions and dropout patterns."""

    def __init__(self, tokens: np.ndarray, segments: np.ndarray | None, dropped: bool) -> None:
        b, t = tokens.shape
        of = np.zeros((b, t), int) if segments is None else segments
        same = of[:, :, None] == of[:, None, :]
        self.mask = torch.tensor(same & np.tril(np.ones((t, t), bool)))[:, None]  # (B, 1, T, T)
        positions = [[int((row[:i] == row[i]).sum()) for i in range(t)] for row in of]
        self.positions = torch.tensor(positions)
        self.dropped = dropped

    def drop(self, name: str, x: torch.Tensor, p: float) -> torch.Tensor:
        if not self.dropped or not p:
            return x
        keep = dropout_pattern(tuple(x.shape), p, (SEED, zlib.crc32(name.encode())), "float64")
        return x * torch.tensor(keep)

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~self.mask, -torch.inf)
        y = self.drop(name, scores.softmax(-1), p) @ v
        return y.transpose(1, 2).flatten(2)


def linear(where: Pass, params: Params, model: Model, layer: str, x: torch.Tensor, out_in: bool) -> torch.Tensor:
    """A layer and its LoRA layer."""
    weight = params[f"{layer}.weight"]
    y = F.linear(x, weight if out_in else weight.T, params.get(f"{layer}.bias"))
    down, up = (params.get(f"{layer}.lora_{side}.default.weight") for side in "AB")
    if down is None or up is None:
        return y
    lora = model.adapters["default"].layers[layer]
    return y + lora.scale * F.linear(F.linear(where.drop(f"{layer}.lora", x, lora.dropout), down), up)


def gpt2(model: Model, params: Params, tokens: torch.Tensor, where: Pass) -> torch.Tensor:
    config, heads = model.config, model.config.n_head
    dk, dv = config.key_width, config.value_width

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"], config.layer_norm_epsilon
        )

    x = params["transformer.wte.weight"][tokens] + params["transformer.wpe.weight"][where.positions]
    x = where.drop("transformer.drop", x, config.embd_pdrop)
    for i in range(config.n_layer):
        name = f"transformer.h.{i}"
        qkv = linear(where, params, model, f"{name}.attn.c_attn", norm(f"{name}.ln_1", x), False)
        q, k, v = (
            z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in qkv.split([heads * dk, heads * dk, heads * dv], -1)
        )
        y = where.attend(f"{name}.attn", q, k, v, config.attn_pdrop)
        y = linear(where, params, model, f"{name}.attn.c_proj", y, False)
        x = x + where.drop(f"{name}.attn.c_proj", y, config.resid_pdrop)
        hidden = F.gelu(
            linear(where, params, model, f"{name}.mlp.c_fc", norm(f"{name}.ln_2", x), False), approximate="tanh"
        )
        y = linear(where, params, model, f"{name}.mlp.c_proj", hidden, False)
        x = x + where.drop(f"{name}.mlp.c_proj", y, config.resid_pdrop)
    return F.linear(norm("transformer.ln_f", x), params["transformer.wte.weight"])


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE by complex numbers: feature i and feature i + D/2 are the parts of one."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[:, None, :, None] * speed
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def llama(model: Model, params: Params, tokens: torch.Tensor, where: Pass) -> torch.Tensor:
    config = model.config
    group = config.n_head // config.n_kv_head

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], params[f"{name}.weight"], config.rms_norm_eps)

    x = params["model.embed_tokens.weight"][tokens]
    for i in range(config.n_layer):
        name = f"model.layers.{i}"

        def heads(which: str, n: int, a2: torch.Tensor, name: str = name) -> torch.Tensor:
            y = linear(where, params, model, f"{name}.self_attn.{which}_proj", a2, True)
            return y.unflatten(-1, (n, -1)).transpose(1, 2)

        a2 = norm(f"{name}.input_layernorm", x)
        q = turned(heads("q", config.n_head, a2), where.positions, config.rope_theta)
        k = turned(heads("k", config.n_kv_head, a2), where.positions, config.rope_theta)
        k, v = (z.repeat_interleave(group, 1) for z in (k, heads("v", config.n_kv_head, a2)))
        y = where.attend(f"{name}.self_attn", q, k, v, config.attention_dropout)
        x = x + linear(where, params, model, f"{name}.self_attn.o_proj", y, True)
        a6 = norm(f"{name}.post_attention_layernorm", x)
        gate, up = (linear(where, params, model, f"{name}.mlp.{w}_proj", a6, True) for w in ("gate", "up"))
        x = x + linear(where, params, model, f"{name}.mlp.down_proj", F.silu(gate) * up, True)
    head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return F.linear(norm("model.norm", x), head)


def gpt2_model(engine: str, dtype: str) -> Model:
    config = onfoot.GPT2Config(
        n_layer=2, n_head=3, n_embd=15, n_positions=12, vocab_size=17, attn_pdrop=0.3, resid_pdrop=0.2, embd_pdrop=0.1,
        qk_head_dim=4,
    )  # fmt: skip
    return onfoot.create(config, 0, dtype, engine)


def llama_model(engine: str, dtype: str, kind: str = "llama") -> Model:
    config = onfoot.LlamaConfig(
        vocab_size=17, hidden_size=24, intermediate_size=19, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=12, attention_dropout=0.3, tie_word_embeddings=kind == "qwen2",
        model_type=kind,
    )  # fmt: skip
    return onfoot.create(config, 0, dtype, engine)


FAMILIES: dict[str, tuple[Callable[..., Model], Any]] = {
    "gpt2": (gpt2_model, gpt2),
    "llama": (llama_model, llama),
    "qwen2": (lambda engine, dtype: llama_model(engine, dtype, "qwen2"), llama),
}


def check(model: Model, network: Any, packed: bool, dropped: bool, close: float) -> None:
    """The loss and each gradient, relative to its own norm."""
    rng = np.random.default_rng(1)
    for name, p in model.params.items():
        model.params[name] = np.asarray(p) + 0.3 * rng.standard_normal(tuple(p.shape))
    tokens, targets = rng.integers(0, 17, (2, 3, 12))
    targets[rng.random(targets.shape) < 0.2] = -100
    segments = np.sort(rng.integers(0, 4, tokens.shape), axis=1) if packed else None
    loss, grads = model.loss_and_grads(tokens, targets, segments=segments, dropout_seed=SEED if dropped else None)

    leaves = {k: torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for k, v in model.params.items()}
    logits = network(model, leaves, torch.tensor(tokens), Pass(tokens, segments, dropped))
    right = F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-100)
    right.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(right.item(), rel=close)
    assert grads.keys() == model.trainable
    for name, g in grads.items():
        grad = leaves[name].grad
        assert grad is not None
        if name.endswith("c_attn.bias"):  # the keys' part is 0, which autograd has as rounding noise
            width = model.config.n_head * model.config.key_width
            grad[width : 2 * width] = 0
        assert_close(np.asarray(g), grad.numpy(), close, name)


@pytest.mark.parametrize("lora", [False, True], ids=["all parameters", "LoRA layers"])
@pytest.mark.parametrize(("packed", "dropped"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_that_of_autograd(family: str, engine: str, packed: bool, dropped: bool, lora: bool) -> None:
    make, network = FAMILIES[family]
    model = make(engine, "float64")
    if lora:
        model.add_lora(r=3, alpha=5, dropout=0.25)
    check(model, network, packed, dropped, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_is_on_the_kernels_to_their_rounding(family: str) -> None:
    pytest.importorskip("numba")
    make, network = FAMILIES[family]
    check(make("numba", "float32"), network, True, True, 5e-5)


def test_a_pattern_of_another_place_would_be_seen() -> None:
    """Dropout of the first block with the patterns of the second: no gradient agrees any more."""
    model = gpt2_model("numpy", "float64")

    class Wrong(Pass):
        def drop(self, name: str, x: torch.Tensor, p: float) -> torch.Tensor:
            return super().drop(name.replace(".h.0.", ".h.1."), x, p)

    def wrong(model: Model, params: Params, tokens: torch.Tensor, where: Pass) -> torch.Tensor:
        where.__class__ = Wrong
        return gpt2(model, params, tokens, where)

    with pytest.raises(AssertionError):
        check(model, wrong, False, True, 1e-10)
