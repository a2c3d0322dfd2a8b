"""Sequences in the slots of one cache: each row's logits are bitwise those of its sequence alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import onfoot
from onfoot.config import Config
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.generate.slots import SlotCache
from onfoot.models.model import Model
from onfoot.models.params import quantizable
from onfoot.quantized import FORMS, KINDS, FrozenWeight, HalfWeight, QuantizedWeight, rounded

pytest.importorskip("numba")

GPT2 = onfoot.GPT2Config(n_layer=2, n_head=3, n_embd=96, n_positions=90, vocab_size=161, n_inner=160)
LLAMA = onfoot.LlamaConfig(
    vocab_size=161,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=90,
)
ODD = replace(LLAMA, hidden_size=54, num_attention_heads=9, num_key_value_heads=3, intermediate_size=31)
ODD_GPT2 = replace(GPT2, n_embd=33, n_inner=41, activation_function="gelu")
CASES: list[tuple[Config, str | None]] = [(config, kind) for config in (GPT2, LLAMA) for kind in (None, *KINDS)]
CASES += [(LLAMA, kind) for kind in ("BF16", "F16", *(kind for kind in FORMS if kind not in KINDS))] + [(GPT2, "BF16")]
WINDOW = replace(LLAMA, model_type="mistral", sliding_window=7)
CASES += [(WINDOW, None), (replace(LLAMA, model_type="qwen3"), None)]
CASES += [(ODD, None), (ODD_GPT2, None), (replace(GPT2, tie_word_embeddings=False, lm_head_bias=True), None)]


def as_kept(rng: np.random.Generator, values: np.ndarray, kind: str, shape: tuple[int, int]) -> FrozenWeight:
    """The values in 16 bits, or random blocks of a kind that files have and `quantize` does not make."""
    if kind in ("BF16", "F16"):
        return HalfWeight(kind, rounded(values, kind))
    form, blocks = FORMS[kind], shape[1] // FORMS[kind].block
    codes = rng.integers(-128, 128, (shape[0], blocks, form.n_bytes)).astype(np.int8)
    codes = codes // 4 if form.bits == 8 else codes.view(np.uint8)
    factors = [rng.normal(0, 0.01, (shape[0], blocks)).astype(form.scale) for _ in range(1 + form.has_minimum)]
    return QuantizedWeight(kind, codes, *factors)


def make(config: Config, kind: str | None = None, engine: str = "numba", lora: bool = False) -> Model:
    model = onfoot.create(config, 0, engine=engine)
    rng = np.random.default_rng(1)
    for p in model.params.values():
        p += rng.normal(0, 0.1, p.shape).astype(np.float32)
    if kind in KINDS:
        model.quantize(kind)
    elif kind:
        for name, out_in in quantizable(config).items():
            shape = model.params[name].shape if out_in else model.params[name].shape[::-1]
            weight = as_kept(rng, model.params[name] if out_in else model.params[name].T, kind, shape)
            model.params[name] = weight if out_in else weight.T
    if lora:
        model.add_lora(r=3)
        for name in sorted(model.trainable):
            model.params[name] += rng.normal(0, 0.1, model.params[name].shape).astype(np.float32)
    return model


def alone(model: Model, tokens: np.ndarray, prompt: int) -> list[np.ndarray]:
    """The logits after the prompt and after each further token, of a sequence alone."""
    cache, out, begin = KVCache(80), [], 0
    for end in range(prompt, len(tokens) + 1):
        out.append(np.array(step(model, tokens[None, begin:end], np.zeros(1, np.int64), cache)[0]))
        begin = end
    return out


def check_rows(model: Model, n: int = 8) -> SlotCache:
    """Sequences of different lengths join and leave; the logits of each are those of the sequence alone."""
    rng = np.random.default_rng(n)
    prompts = rng.permutation(np.arange(2, 2 + 5 * n, 5))
    texts = [rng.integers(0, 161, prompt + 4 + i) for i, prompt in enumerate(prompts)]
    right = [alone(model, text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
    cache, done = SlotCache(model, n, 80), [0] * n
    for time in range(2 * n + 6):
        joins = [i for i in range(n) if time == i]
        for i in joins:
            logits = cache.prefill(cache.slots[-1 - i], texts[i][: prompts[i]].tolist())
            np.testing.assert_array_equal(logits, right[i][0])
        rows = [i for i in reversed(range(n)) if time >= i and done[i] < len(right[i]) - 1]
        if rows:
            tokens = [int(texts[i][prompts[i] + done[i]]) for i in rows]
            logits = cache.next_logits([cache.slots[-1 - i] for i in rows], tokens)
            for i, row in zip(rows, logits, strict=True):
                done[i] += 1
                np.testing.assert_array_equal(row, right[i][done[i]])
    assert done == [len(x) - 1 for x in right]
    assert [cache.slots[-1 - i].tokens for i in range(n)] == [text.tolist() for text in texts]
    return cache


@pytest.mark.parametrize("config, kind", CASES)
def test_a_rows_logits_do_not_depend_on_the_other_rows(config: Config, kind: str | None, threads: int) -> None:
    cache = check_rows(make(config, kind))
    assert all(kept.replay is not None for kept in cache.steps.values())
    assert len(cache.steps) > 4


@pytest.mark.parametrize("config", [GPT2, LLAMA, ODD], ids=["gpt2", "llama", "odd"])
def test_with_lora_layers(config: Config, threads: int) -> None:
    cache = check_rows(make(config, lora=True))
    assert all(kept.replay is not None for kept in cache.steps.values())


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_an_engine_without_recordings_decodes_row_by_row(config: Config) -> None:
    assert not check_rows(make(config, engine="numpy"), 3).steps


def test_a_copied_prefix_is_continued_as_its_source() -> None:
    model = make(LLAMA)
    tokens = np.random.default_rng(0).integers(0, 161, 60)
    right = alone(model, tokens, 20)
    cache = SlotCache(model, 3, 80)
    cache.prefill(cache.slots[1], tokens[:20].tolist())
    cache.prefill(cache.slots[2], tokens[30:].tolist())  # is overwritten
    cache.slots[2].copy_from(cache.slots[1], 20)
    for i in range(20, 30):
        logits = cache.next_logits([cache.slots[2]], [int(tokens[i])])[0]
        np.testing.assert_array_equal(logits, right[i - 19])
    assert cache.slots[1].tokens == tokens[:20].tolist()
    assert cache.slots[2].tokens == tokens[:30].tolist()
    cache.slots[2].truncate(22)
    np.testing.assert_array_equal(cache.next_logits([cache.slots[2]], [int(tokens[22])])[0], right[3])


def test_a_prompt_in_parts_has_the_logits_of_the_whole() -> None:
    model = make(LLAMA)
    tokens = np.random.default_rng(0).integers(0, 161, 75).tolist()
    whole, parts = SlotCache(model, 1, 80), SlotCache(model, 1, 80)
    right = whole.prefill(whole.slots[0], tokens)
    parts.prefill(parts.slots[0], tokens[:40])
    np.testing.assert_array_equal(parts.prefill(parts.slots[0], tokens[40:]), right)


def test_there_is_no_token_beyond_a_slot() -> None:
    cache = SlotCache(make(LLAMA), 2, 5)
    for slot, n in zip(cache.slots, (5, 3), strict=True):
        cache.prefill(slot, [1] * n)
    with pytest.raises(IndexError, match="cannot add token 5: a slot has capacity 5"):
        cache.next_logits(cache.slots, [1, 1])
    assert [slot.length for slot in cache.slots] == [5, 3]
