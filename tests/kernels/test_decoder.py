"""Tokens that come one after the other, against the formulas on the whole text in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import onfoot
from onfoot.config import Config
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.kernels import pool
from onfoot.kernels.decoder import Decoder
from onfoot.models.model import Model
from onfoot.quantized import KINDS, Quantized

pytest.importorskip("numba")
CLOSE = 2e-6


GPT2 = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=40, vocab_size=33)
LLAMA = onfoot.LlamaConfig(
    vocab_size=33,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=40,
    tie_word_embeddings=True,
)


def models(config: Config, kind: str | None = None) -> tuple[Model, Model]:
    """The same weights, rounded to codes or not, in float32 on the kernels and in float64 on the formulas."""
    ours = onfoot.create(config, 0, engine="numba")
    rng = np.random.default_rng(1)
    for p in ours.params.values():
        p += rng.normal(0, 0.1, p.shape).astype(np.float32)
    if kind:
        ours.quantize(kind)
    params = {name: np.asarray(p) if isinstance(p, Quantized) else p for name, p in ours.params.items()}
    return ours, Model(ours.config, params, "float64", "numpy")


def check(ours: Model, truth: Model, batch: int, pad: np.ndarray | None = None, prompt: int = 5) -> KVCache:
    """Every token's logits, of sequences that begin at `pad`."""
    tokens = np.random.default_rng(2).integers(0, 33, (batch, 17))
    pad = np.zeros(batch, int) if pad is None else pad
    cache, run, place = KVCache(17), ours.new_run(keep_saved=False), 0
    for end in (prompt, *range(prompt + 1, 18)):
        logits = step(ours, run, tokens[:, place:end], pad, cache)
        place = end
        for row in range(batch):
            right = truth.logits(tokens[row : row + 1, pad[row] : end])[0, -1]
            assert np.linalg.norm(logits[row] - right) <= CLOSE * np.linalg.norm(right)
    return cache


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("batch", [1, 3, 9, 30])  # few rows, several, many
def test_a_tokens_logits_are_those_of_the_whole_text(
    config: Config, kind: str | None, batch: int, threads: int
) -> None:
    assert check(*models(config, kind), batch).decoder is not None


@pytest.mark.parametrize(
    "config",
    [
        replace(GPT2, n_head=1, n_embd=7),
        replace(GPT2, n_head=3, n_embd=33, qk_head_dim=5, n_inner=41),
        replace(GPT2, n_head=3, n_embd=20, head_dim=7, qk_head_dim=4),
        replace(GPT2, activation_function="relu"),
        replace(GPT2, activation_function="gelu"),
        replace(GPT2, tie_word_embeddings=False, lm_head_bias=True),
        replace(LLAMA, num_attention_heads=9, num_key_value_heads=3, hidden_size=54, tie_word_embeddings=False),
        replace(LLAMA, num_attention_heads=2, hidden_size=36, intermediate_size=31),
        replace(LLAMA, attention_bias=True, mlp_bias=True),
    ],
    ids=range(9),
)
def test_any_sizes_and_kinds(config: Config, threads: int) -> None:
    assert check(*models(config), 2).decoder is not None


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_sequences_that_begin_later_see_nothing_before(config: Config, threads: int) -> None:
    assert check(*models(config), 3, pad=np.array([2, 0, 4])).decoder is not None


def working_memory(decoder: Decoder) -> list[np.ndarray]:
    """Of attention and of products that threads do in parts: a row for each."""
    return [
        args[-1] if call.name.endswith("attention") else args[2]
        for call, args in decoder._calls
        if (call.name in ("decoder.attention", "few_rows.by_rows"))
    ]


def test_the_number_of_threads_may_change_on_the_way(on_threads: Callable[[int], None]) -> None:
    ours, truth = models(GPT2)
    tokens = np.random.default_rng(2).integers(0, 33, (1, 9))
    cache, run = KVCache(9), ours.new_run(keep_saved=False)
    step(ours, run, tokens[:, :3], np.zeros(1, int), cache)
    for end in range(4, 10):
        on_threads(1 + end % 2)
        logits = step(ours, run, tokens[:, end - 1 : end], np.zeros(1, int), cache)
        assert {x.shape[0] for x in working_memory(cache.decoder)} == {pool.threads()}
        right = truth.logits(tokens[:, :end])[0, -1]
        assert np.linalg.norm(logits[0] - right) <= CLOSE * np.linalg.norm(right)


def test_there_is_no_token_beyond_the_cache() -> None:
    ours, _ = models(GPT2)
    cache, run = KVCache(3), ours.new_run(keep_saved=False)
    for end in (2, 3):
        step(ours, run, np.zeros((1, end - cache.length), int), np.zeros(1, int), cache)
    assert cache.decoder is not None
    with pytest.raises(IndexError, match="room for 3"):
        step(ours, run, np.zeros((1, 1), int), np.zeros(1, int), cache)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_what_is_not_plain_goes_block_by_block(config: Config) -> None:
    ours, truth = models(config)
    assert check(truth, truth, 1).decoder is None
    double = Model(config, truth.params, "float64", "numba")
    assert check(double, truth, 1).decoder is False  # asked for, and refused
    ours.add_lora(r=2)
    assert check(ours, truth, 1).decoder is None  # a fresh companion adds 0
