"""Recorded and replayed generation steps, compared with the formulas on the full text in float64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.config import Config
from onfoot.engine import Engine
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.models.model import Model
from onfoot.quantized import KINDS, Quantized
from onfoot.recording import pool

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


def as_numbers(model: Model) -> dict[str, np.ndarray]:
    """The parameters, dequantised if they are quantised."""
    return {name: np.asarray(p) if isinstance(p, Quantized) else p for name, p in model.params.items()}


def models(config: Config, kind: str | None = None) -> tuple[Model, Model]:
    """The same weights, quantised or not, in float32 on the kernels and in float64 on the formulas."""
    ours = onfoot.create(config, 0, engine="numba")
    rng = np.random.default_rng(1)
    for p in ours.params.values():
        p += rng.normal(0, 0.1, p.shape).astype(np.float32)
    if kind:
        ours.quantize(kind)
    return ours, Model(ours.config, as_numbers(ours), "float64", "numpy")


def recorded(cache: KVCache) -> bool:
    """Whether the last token was replayed."""
    return cache.step is not None and cache.step.replay is not None


def no_pad(rows: int) -> np.ndarray:
    return np.zeros(rows, np.int64)


def check(ours: Model, truth: Model, batch: int, pad: np.ndarray | None = None, prompt: int = 5) -> KVCache:
    """Checks every token's logits for sequences that start at `pad`."""
    tokens = np.random.default_rng(2).integers(0, 33, (batch, 17))
    pad = no_pad(batch) if pad is None else pad
    cache, place = KVCache(17), 0
    for end in (prompt, *range(prompt + 1, 18)):
        logits = step(ours, tokens[:, place:end], pad, cache)
        place = end
        for row in range(batch):
            right = truth.logits(tokens[row : row + 1, pad[row] : end])[0, -1]
            assert np.linalg.norm(logits[row] - right) <= CLOSE * np.linalg.norm(right)
    assert cache.length == 17
    return cache


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("batch", [1, 3, 9, 30])  # few rows, several, many
def test_a_tokens_logits_are_those_of_the_whole_text(
    config: Config, kind: str | None, batch: int, threads: int
) -> None:
    assert recorded(check(*models(config, kind), batch))


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
def test_any_sizes_and_quantisations(config: Config, threads: int) -> None:
    assert recorded(check(*models(config), 2))


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("prompt", [5, 16])
def test_padded_sequences_do_not_attend_to_the_padding(config: Config, prompt: int, threads: int) -> None:
    assert recorded(check(*models(config), 3, np.array([2, 0, 4]), prompt))


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_lora_layers_act_on_every_token(config: Config, threads: int) -> None:
    ours, truth = models(config)
    rng = np.random.default_rng(3)
    for model in (ours, truth):
        model.add_lora(r=2)
    for name in sorted(ours.trainable):
        ours.params[name] += rng.normal(0, 0.03, ours.params[name].shape).astype(np.float32)
        truth.params[name][...] = ours.params[name]
    assert recorded(check(ours, truth, 2))


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_cache_of_one_token_and_a_first_token_of_its_own(config: Config, threads: int) -> None:
    assert recorded(check(*models(config), 2, prompt=1))


def test_the_number_of_threads_may_change_between_tokens(on_threads: Callable[[int], None]) -> None:
    ours, truth = models(GPT2)
    tokens = np.random.default_rng(2).integers(0, 33, (1, 9))
    cache, seen = KVCache(9), []
    step(ours, tokens[:, :3], no_pad(1), cache)
    for end in range(4, 10):
        on_threads(1 + end % 3)
        logits = step(ours, tokens[:, end - 1 : end], no_pad(1), cache)
        assert recorded(cache) and cache.step.key[-1] == pool.threads()
        seen.append(cache.step)
        right = truth.logits(tokens[:, :end])[0, -1]
        assert np.linalg.norm(logits[0] - right) <= CLOSE * np.linalg.norm(right)
    assert len({*map(id, seen)}) == 6  # working memory depends on the number of threads


def test_one_recording_serves_all_tokens(threads: int) -> None:
    ours, _ = models(GPT2)
    cache, seen = KVCache(9), set()
    step(ours, np.zeros((2, 3), np.int64), no_pad(2), cache)
    assert cache.step is None  # a prompt is not a token
    for _ in range(6):
        step(ours, np.zeros((2, 1), np.int64), no_pad(2), cache)
        seen.add(id(cache.step.replay))
    assert recorded(cache) and len(seen) == 1


def test_a_model_that_changes_between_tokens_is_recorded_again(threads: int) -> None:
    ours, _ = models(GPT2)
    ours.add_lora(r=2)
    rng = np.random.default_rng(3)
    for name in sorted(ours.trainable):
        ours.params[name] += rng.normal(0, 0.3, ours.params[name].shape).astype(np.float32)
    tokens = rng.integers(0, 33, (2, 12))

    def new_array() -> None:
        ours.params["transformer.h.0.mlp.c_fc.weight"] = -ours.params["transformer.h.0.mlp.c_fc.weight"]

    def same_array() -> None:
        ours.params["transformer.h.1.mlp.c_fc.weight"][...] *= -1

    changes: list[tuple[Callable[[], Any], bool]] = [
        (lambda: None, False),
        (new_array, True),
        (same_array, False),
        (lambda: ours.use_adapter(None), True),
        (lambda: ours.use_adapter("default"), True),
    ]
    cache = KVCache(12)
    step(ours, tokens[:, :5], no_pad(2), cache)
    step(ours, tokens[:, 5:6], no_pad(2), cache)
    for place, (change, anew) in enumerate(changes, start=6):
        change()
        held = {layer: (k.copy(), v.copy()) for layer, (k, v) in cache._blocks.items()}
        before, length = cache.step, cache.length
        logits = step(ours, tokens[:, place : place + 1], no_pad(2), cache)
        assert recorded(cache) and (cache.step is not before) == anew
        other = KVCache(12)  # the same token call by call, with the same cache
        other.length = length
        other._blocks = held
        double = truth_behind(ours, tokens[:, place : place + 1], other)
        assert np.linalg.norm(logits - double) <= CLOSE * np.linalg.norm(double)


def truth_behind(ours: Model, tokens: np.ndarray, cache: KVCache) -> Any:
    """The formulas' logits in float64 for one more token after those in a cache."""
    truth = Model(ours.config, onfoot.create(ours.config, 0, "float64", "numpy").params, "float64", "numpy")
    if ours.active_adapter is not None:
        truth.add_lora(r=2)
    for name in truth.params:
        truth.params[name] = ours.params[name]
    cache._blocks = {b: (k.astype(np.float64), v.astype(np.float64)) for b, (k, v) in cache._blocks.items()}
    return step(truth, tokens, no_pad(len(tokens)), cache)


def test_there_is_no_token_beyond_the_cache() -> None:
    ours, _ = models(GPT2)
    cache = KVCache(3)
    for end in (2, 3):
        step(ours, np.zeros((1, end - cache.length), int), no_pad(1), cache)
    assert recorded(cache)
    with pytest.raises(IndexError, match="cannot add token 3: the KV cache has capacity 3"):
        step(ours, np.zeros((1, 1), int), no_pad(1), cache)
    assert cache.length == 3


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_ops_without_kernels_run_call_by_call(config: Config) -> None:
    ours, truth = models(config)
    assert check(truth, truth, 1).step is None
    double = Model(config, truth.params, "float64", "numba")
    cache = check(double, truth, 1)
    assert cache.step is not None and not recorded(cache)  # tried once, not recorded
    ours.add_lora(r=2, targets=["c_attn.q"] if config is GPT2 else None)
    assert recorded(check(ours, truth, 1)) == (config is LLAMA)  # a fresh LoRA layer adds 0; those of parts are NumPy's


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_cache_that_numpy_writes_is_not_recorded(config: Config, threads: int) -> None:
    """As where the kernel for cached attention is refused: a copy made while recording would never be made again."""
    ours, truth = models(config)
    engine = ours.engine
    table = {name: function for name, function in engine.table.items() if name != "cached_attention"}
    ours.engine = Engine("numba", table, engine._asarray, engine._copy)
    cache = check(ours, truth, 3, np.array([2, 0, 4]))
    assert cache.step is not None and not recorded(cache)


@pytest.mark.parametrize("engine", ["numpy", "numba"])
def test_a_cache_is_freed_with_its_generation(engine: str) -> None:
    """Freed without waiting for the garbage collector: the next generation reuses the memory."""
    model, kept = onfoot.create(GPT2, engine=engine), []
    gc.disable()
    try:
        cache = KVCache(8)
        kept.append(weakref.ref(cache))
        for tokens in ([[1, 2]], [[3]]):
            step(model, np.array(tokens), no_pad(1), cache)
        del cache
        assert kept[0]() is None
    finally:
        gc.enable()
