"""Generation: cached and uncached logits agree, and every sampling strategy works as documented."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import onfoot
from onfoot.arrays import to_numpy
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.generate.sampling import Sampling, next_token, penalise, probabilities
from onfoot.models.model import Model
from oracles import assert_close, scrambled

CONFIG = onfoot.GPT2Config(vocab_size=31, n_positions=24, n_embd=12, n_layer=2, n_head=2, qk_head_dim=5)
PLAIN = onfoot.GPT2Config(vocab_size=31, n_positions=24, n_embd=12, n_layer=2, n_head=2)


def model(config: onfoot.GPT2Config = CONFIG, engine: str = "numpy") -> Model:
    return Model(config, scrambled(onfoot.create(config).params, 0, scale=0.5), "float64", engine)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [4, 1, 1, 5], [10, 1]], ids=str)
def test_cached_logits_equal_uncached_ones_for_any_split(pieces: list[int], engine: str) -> None:
    m = model(engine=engine)
    tokens = np.random.default_rng(0).integers(0, 31, (3, 11))
    full = to_numpy(m.logits(tokens))
    cache, place = KVCache(11), 0
    for n in pieces:
        logits = to_numpy(step(m, tokens[:, place : place + n], np.zeros(3, int), cache))
        place += n
        assert_close(logits, full[:, place - 1], 1e-12)


def test_a_step_computes_one_row_of_everything_and_one_row_of_scores() -> None:
    """Counts the rows of every op's input and the number of keys per query."""
    m = model()
    rows: list[set[int]] = []
    scores: list[list[tuple[int, int]]] = []

    def counted(name: str, op: Any) -> Any:
        def forward(x: Any, *rest: Any, **more: Any) -> Any:
            if name == "attention_forward":
                scores[-1].append((x.shape[-2], rest[0].shape[-2]))
            else:
                rows[-1].add(int(np.prod(np.shape(x)[:2])))  # (B, T, ...)
            return op(x, *rest, **more)

        return forward

    table = m.engine.table
    m.engine.table = {n: counted(n, op) if n.endswith("_forward") else op for n, op in table.items()}
    cache = KVCache(24)
    for pieces in (np.zeros((1, 10), int), *[np.zeros((1, 1), int)] * 14):
        rows.append(set()), scores.append([])
        step(m, pieces, np.zeros(1, int), cache)
    assert rows == [{10, 1}] + [{1}] * 14  # logits are computed for the last token of the prompt only
    assert scores == [[(10, 10)] * 2] + [[(1, held)] * 2 for held in range(11, 25)]  # two blocks


def test_prompts_of_different_lengths_continue_as_they_would_alone() -> None:
    m = model()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 31, n).tolist() for n in (3, 9, 1)]
    together = m.generate(prompts, 8, temperature=0)
    for prompt, out in zip(prompts, together, strict=True):
        alone = m.generate(np.array([prompt]), 8, temperature=0)
        assert (out == alone[0]).all()
    sampled = m.generate(prompts, 8, seed=4)
    assert (sampled[0] == m.generate(prompts[:1], 8, seed=4)[0]).all()  # a row's own generator


def test_greedy_text_equals_transformers(tmp_path: Any) -> None:
    m = model(PLAIN)
    m.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    prompt = np.array([[1, 2, 3], [9, 8, 7]])
    out = theirs.generate(torch.tensor(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert (m.generate(prompt, 12, temperature=0) == out.numpy()).all()


def test_the_distribution_equals_transformers_warpers() -> None:
    rng = np.random.default_rng(3)
    ids = torch.zeros((1, 1), dtype=torch.long)
    for _ in range(20):
        logits = rng.normal(0, 3, 50)
        scores = torch.tensor(logits)[None]
        cases = [
            (Sampling(top_k=7), TopKLogitsWarper(7)),
            (Sampling(top_p=0.6), TopPLogitsWarper(0.6)),
            (Sampling(min_p=0.1), MinPLogitsWarper(0.1)),
        ]
        for sampling, warper in cases:
            expected = warper(ids, scores.clone()).softmax(-1)[0].numpy()
            assert_close(probabilities(logits, sampling), expected, 1e-12, str(sampling))
        assert_close(probabilities(logits, Sampling(temperature=0.5)), (scores / 0.5).softmax(-1)[0].numpy(), 1e-12)
        seen = rng.integers(0, 50, 9)
        penalty = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(seen)[None], scores.clone())[0].numpy()
        assert_close(penalise(logits, seen, 1.3), penalty, 1e-12)


def test_samples_follow_the_distribution_and_the_seed() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    rng = np.random.default_rng(0)
    seen = np.array([0])
    draws = np.array([next_token(logits, seen, Sampling(), rng) for _ in range(8000)])
    assert np.abs(np.bincount(draws, minlength=4) / 8000 - np.exp(logits)).max() < 0.02
    few = {next_token(logits, seen, Sampling(top_k=2), rng) for _ in range(200)}
    assert few == {0, 1}
    m = model()
    prompt = np.array([[1, 2, 3]])
    assert (m.generate(prompt, 12, seed=1) == m.generate(prompt, 12, seed=1)).all()
    assert (m.generate(prompt, 12, seed=1) != m.generate(prompt, 12, seed=2)).any()


def test_a_row_ends_at_a_stop_id_and_the_others_continue() -> None:
    m = model()
    free = m.generate([[1, 2, 3], [4, 5]], 10, temperature=9, seed=1)
    (stop, *_) = [token for token in free[0][3:9].tolist() if token not in free[1][2:]]
    first = free[0][3:].tolist().index(stop)
    out = m.generate([[1, 2, 3], [4, 5]], 10, temperature=9, seed=1, stop_ids=[stop])
    assert out[0].tolist() == free[0][: 3 + first + 1].tolist() and len(out[0]) < len(free[0])
    assert out[1].tolist() == free[1].tolist()


def test_the_tokenizers_end_token_ends_a_text_even_if_the_configuration_does_not_name_it() -> None:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(vocab_size=tokenizer.size, n_positions=40, n_embd=8, n_layer=1, n_head=2, eos_token_id=3)
    m = onfoot.create(config)
    m.tokenizer = tokenizer
    m.params["transformer.wte.weight"][:] = 0
    m.params["transformer.ln_f.bias"][:] = 1
    m.params["transformer.wte.weight"][tokenizer.eos_id] = 1  # always generates its end-of-text token
    assert m.generate([[5, 6]], 20, temperature=0)[0].tolist() == [5, 6, tokenizer.eos_id]


def test_damaged_weights_raise_an_error() -> None:
    m = model()
    m.params["transformer.ln_f.weight"][0] = np.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        m.generate(np.array([[1]]), 1)


def test_a_tiny_temperature_picks_the_most_likely_token() -> None:
    logits = np.array([1.0, 3.0, 2.0])
    assert probabilities(logits, Sampling(temperature=1e-320)).tolist() == [0, 1, 0]


def test_a_stop_string_ends_the_text() -> None:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(vocab_size=tokenizer.size, n_positions=40, n_embd=8, n_layer=1, n_head=2)
    m = model(config)
    m.tokenizer = tokenizer
    prompt = [tokenizer.encode("ab")]
    free = m.generate(prompt, 30, seed=2)[0]
    text = tokenizer.decode(free[2:].tolist())
    stop = text[4:6]
    out = tokenizer.decode(m.generate(prompt, 30, seed=2, stop=[stop])[0][2:].tolist())
    assert out == text[: text.index(stop) + 2]


def test_sliding_goes_beyond_the_context_and_agrees_before_it() -> None:
    m = model()
    prompt = np.arange(5)[None]
    within = m.generate(prompt, 19, temperature=0)
    beyond = m.generate(prompt, 60, temperature=0, slide=True)
    assert beyond.shape == (1, 65)
    assert (beyond[:, :24] == within).all()
    # after the first slide, the context is the last half: tokens 13 ... 24 predict token 25
    assert beyond[0, 25] == np.argmax(m.logits(beyond[:, 13:25])[0, -1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": np.zeros((1, 25), int)}, "a sequence of 25 tokens exceeds n_positions=24"),
        (
            {"max_new_tokens": 30},
            "3 tokens plus 30 new tokens exceeds n_positions=24; .* at most 21 new tokens, or use slide",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"tokens": []}, "no prompts|empty"),
        ({"tokens": [[1], []]}, "empty batch|dtype"),
        ({"tokens": [[31]]}, "token id 31 is outside"),
        ({"tokens": np.array([1, 2, 3])}, r"tokens must have shape \(batch, tokens\), got \(3,\)"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"temperature": -1.0}, "temperature must be >= 0 .*, got -1.0"),
        ({"top_k": 0}, "top_k must be >= 1 or None, got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\] or None, got 1.5"),
        ({"min_p": 2.0}, r"min_p must be in \[0, 1\] or None, got 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0 .*, got 0.0"),
        ({"stop": ["x"]}, "stop strings need a tokenizer"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().generate(**{"tokens": np.array([[1, 2, 3]]), "max_new_tokens": 3, **arguments})


def test_a_model_without_a_causal_mask_cannot_generate() -> None:
    m = onfoot.create(onfoot.GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=1, causal=False))
    with pytest.raises(ValueError, match="causal=False"):
        m.generate(np.array([[1]]), 1)
