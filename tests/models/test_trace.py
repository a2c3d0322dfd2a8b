"""A trace has every array that `onfoot walk` prints, by the same names, and says what it has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from llama_oracle import scrambled_llama
from onfoot.explore.walk import Walk
from onfoot.explore.walk_model import ModelWalk
from onfoot.models.model import Model
from onfoot.models.trace import Trace

CONFIG = onfoot.GPT2Config(n_layer=2, n_head=3, n_embd=12, n_positions=16, vocab_size=20, head_dim=5, qk_head_dim=3)
LLAMA = onfoot.LlamaConfig(
    vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2]])


def walked(config: onfoot.GPT2Config) -> tuple[Walk, Trace]:
    walk = Walk(config, TOKENS, 0, False)
    return walk, walk.context.trace


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_every_array_of_the_walk_is_in_the_trace_by_its_name_block_and_head(tied: bool, causal: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied, causal=causal)
    walk, trace = walked(config)
    compared = set()
    for section in walk.sections():
        for line in section.lines:
            if line.symbol == "∂w_tok" and tied and line.parameter is None:
                continue  # the two parts of a tied gradient
            key = tuple(x for x in (line.symbol, section.block, section.head) if x is not None)
            found = np.asarray(trace[key if len(key) > 1 else key[0]])
            found = found[0] if found.ndim and found.shape[0] == 1 and found.shape[1:] == line.value.shape else found
            np.testing.assert_allclose(found, line.value, rtol=1e-10, atol=1e-14, err_msg=str(key))
            compared.add(key)
    assert {("Δ_3^h", 1, 2), ("ā_5", 0), ("∂w_8", 1), ("ℓ",), ("∂b_v", 0, 1), ("Δ_2^h", 1, 0)} <= compared
    assert len(compared) > 180


LLAMAS = {
    "llama": LLAMA,
    "tied, with biases": replace(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": replace(LLAMA, model_type="qwen2"),
    "qwen3": replace(LLAMA, model_type="qwen3", head_dim=6),
    "no shared heads": replace(LLAMA, num_key_value_heads=6),
}
OF_KEYS_AND_VALUES = re.compile(r"(?:∂|Δ_|∂[wb]_)?[kv](?:_lin|_norm)?")


IN_EVERY_RUN = ("llama", "qwen3")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in IN_EVERY_RUN else pytest.mark.slow) for kind in LLAMAS]
)
def test_every_array_of_the_walk_through_a_llama_is_in_its_trace(kind: str) -> None:
    config = LLAMAS[kind]
    model = scrambled_llama(config, 0)
    trace, walk = model.trace(TOKENS, input_gradient=True), ModelWalk(model, TOKENS)
    group = config.n_head // config.n_kv_head
    compared = set()
    for section in walk.sections():
        for line in section.lines:
            if line.symbol == "∂w_tok" and config.tie_word_embeddings and line.parameter is None:
                continue  # the two parts of a tied gradient
            head = None if line.symbol.endswith("^norm") else section.head  # one norm for all heads
            if head is not None and OF_KEYS_AND_VALUES.fullmatch(line.symbol):
                head //= group  # several query heads share them
            block = (
                0 if line.symbol in ("a_1", "Δ_1") else section.block
            )  # the embedding's output is the first block's input
            key = tuple(x for x in (line.symbol, block, head) if x is not None)
            found = np.asarray(trace[key if len(key) > 1 else key[0]])
            found = found[0] if found.ndim and found.shape[0] == 1 and found.shape[1:] == line.value.shape else found
            found = found.T if line.symbol == "∂w_11" else found  # the walk has a row per token of the vocabulary
            np.testing.assert_allclose(found, line.value, rtol=1e-9, atol=1e-14, err_msg=str(key))
            compared.add(key)
    assert {
        ("∂w_g", 0),
        ("∂w_q", 0, 1),
        ("Δ_q", 0, 1),
        ("q_lin", 0, 0),
        ("∂w_1", 0),
        ("∂w_tok",),
        ("∂w_10",),
    } <= compared
    assert (("∂w_k^norm", 1) in compared) == (kind == "qwen3")
    assert (("∂b_v", 1, 0) in compared) == (kind in ("qwen2", "tied, with biases"))
    assert len(compared) > 200


@pytest.mark.parametrize("engine", ["numpy", "numba", "torch"])
def test_the_parts_of_a_llama_s_attention_add_up_on_every_engine_and_with_packed_texts(engine: str) -> None:
    model = scrambled_llama(LLAMAS["qwen3"], 0)
    model = Model(model.config, {name: np.array(p) for name, p in model.params.items()}, "float64", engine)
    tokens, segments = np.tile(TOKENS, (2, 1)), np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    trace = model.trace(tokens, segments=segments)
    for b in range(2):
        whole = sum(np.asarray(trace[f"Δ_{x}", b]).sum(1) for x in "qkv")
        np.testing.assert_allclose(whole, np.asarray(trace["Δ_2", b]), rtol=1e-9, atol=1e-14)
        made = np.einsum("btc,bhtd->hcd", np.asarray(trace["a_2", b]), np.asarray(trace["∂k_lin", b]))
        np.testing.assert_allclose(made, np.asarray(trace["∂w_k", b]), rtol=1e-9, atol=1e-14)


def test_every_key_that_it_lists_has_an_array() -> None:
    for model in (onfoot.create(config, dtype="float64") for config in (CONFIG, LLAMA, LLAMAS["qwen3"])):
        trace = model.trace(TOKENS)
        keys = trace.keys()
        assert len(keys) == len(set(keys)) > 60
        assert all(np.isfinite(np.where(np.isneginf(trace[key]), 0, trace[key])).all() for key in keys)


@pytest.mark.parametrize("kind", ["adapter", "quantized"])
def test_with_an_adapter_or_quantized_weights_it_lists_only_what_it_can_compute(kind: str) -> None:
    config = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=16, vocab_size=32)
    model = onfoot.create(config, engine="numpy")
    if kind == "adapter":
        model.add_lora(r=2)
    else:
        model.quantize("int8")
    trace = model.trace(TOKENS)
    keys = trace.keys()
    assert all(trace[key] is not None for key in keys)
    assert ("Δ_q", 0) not in keys and ("∂q", 0) in keys


@pytest.mark.parametrize("kind", ["adapter", "quantized"])
def test_so_does_that_of_a_llama(kind: str) -> None:
    config = replace(LLAMAS["qwen3"], hidden_size=32, head_dim=32, intermediate_size=64)
    model = onfoot.create(config, engine="numpy")
    if kind == "adapter":
        model.add_lora(r=2)
    else:
        model.quantize("int8")
    trace = model.trace(TOKENS)
    keys = trace.keys()
    assert all(trace[key] is not None for key in keys)
    assert ("Δ_q", 0) not in keys and ("∂q_lin", 0) in keys and ("k_norm", 0) in keys


def test_the_gradients_inside_a_llama_head_are_those_of_autograd() -> None:
    model = onfoot.create(LLAMA, dtype="float64")
    trace = model.trace(TOKENS)
    for b in range(2):
        q, k, v = (torch.tensor(np.array(trace[x, b])).requires_grad_() for x in "qkv")
        scores = q @ k.repeat_interleave(3, 1).mT / np.sqrt(4)
        rho = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        out = rho @ v.repeat_interleave(3, 1)
        found = torch.autograd.grad(out, (scores, q, k, v), torch.tensor(np.array(trace["Δ_3^h", b])))
        np.testing.assert_allclose(trace["a_3^h", b], out.detach(), atol=1e-14)
        for name, gradient in zip(("Δ_scaled", "∂q", "∂k", "∂v"), found, strict=True):
            np.testing.assert_allclose(trace[name, b], gradient, rtol=1e-10, atol=1e-16, err_msg=name)


@pytest.mark.parametrize(
    ("ascii_", "name"),
    [
        ("delta_12", "Δ_12"), (("rho", 0), ("ρ", 0)), (("rho_raw", 0, 1), ("ρ_raw", 0, 1)), (("abar_5", 1), ("ā_5", 1)),
        (("dw_8", 0), ("∂w_8", 0)), (("dq", 0), ("∂q", 0)), (("drho", 0), ("∂ρ", 0)), ("loss_per_token", "ℓ"),
        (("delta_3^h", -1, -1), ("Δ_3^h", 1, 2)), (("db_q", 0, 0), ("∂b_q", 0, 0)),
        (("Delta_5", 0), ("Δ_5", 0)), ("Delta_12", "Δ_12"),
    ],
)  # fmt: skip
def test_names_may_be_spelled_in_ascii(ascii_: Any, name: Any) -> None:
    trace = onfoot.create(CONFIG, dtype="float64").trace(TOKENS)
    np.testing.assert_array_equal(trace[ascii_], trace[name])


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("Δ_13", "no 'Δ_13'; of the network: a_0 .* of a block: a_1 .* of a head: q k v .*In ASCII: delta_5, "),
        ("Δ_5", r"'Δ_5' is in a block; write trace\['Δ_5', 0\]"),
        (("a_12", 0), r"'a_12' is not in a block; write trace\['a_12'\]"),
        (("Δ_5", 2), "no block 2; the network has 2, from 0 to 1"),
        (("ρ", 0, 3), "no head 3; 'ρ' has 3, from 0 to 2"),
        (("a_5", 0, 1), "'a_5' has no heads"),
    ],
)
def test_a_key_that_is_not_there_says_which_are(key: Any, says: str) -> None:
    with pytest.raises(KeyError, match=says):
        onfoot.create(CONFIG).trace(TOKENS)[key]


def test_what_is_asked_for_later_is_what_the_pass_had() -> None:
    model = onfoot.create(CONFIG, dtype="float64")
    trace = model.trace(TOKENS)
    before = trace["Δ_2^h", 0].copy()
    np.testing.assert_allclose(before.sum(1), trace["Δ_2", 0], atol=1e-15)
    model.train_step(onfoot.AdamW(model, lr=0.1), TOKENS)
    np.testing.assert_array_equal(trace["Δ_2^h", 0], before)


def test_reprs_are_short_and_say_what_there_is() -> None:
    model = onfoot.create(CONFIG)
    trace = model.trace(TOKENS)
    assert repr(model).startswith("Model(GPT-2, ") and "2 blocks of width 12, 3 heads" in repr(model)
    assert len(repr(model)) < 200 and f"{sum(p.size for p in model.params.values()):,} parameters" in repr(model)
    assert (
        len(repr(trace).splitlines()) == 6
        and "in ASCII: delta_5, " in repr(trace)
        and f"loss {trace.loss:.6g}" in repr(trace)
    )
    assert "<td>Δ_5</td>" in trace._repr_html_() and "<td>3 heads" not in trace._repr_html_()
    named = Model(CONFIG, onfoot.create(CONFIG).params)
    named.source = "<script>alert(1)</script>"
    assert "<script>" not in named._repr_html_() and "&lt;script&gt;" in named._repr_html_()
    llama = onfoot.create(LLAMA)
    llama.add_lora(r=2)
    assert "adapter default" in repr(llama) and repr(llama).startswith("Model(llama, ")
    assert "6 heads, 2 key/value heads" in repr(llama) and "6 heads, 2 key/value heads" in llama._repr_html_()
