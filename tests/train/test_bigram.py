"""The bigram yardstick: counted on the training text, measured on the held-out text, in bounded memory."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onfoot.data import bigram
from onfoot.data.bigram import STRENGTHS, bigram_loss


def counted(train: list[int], held_out: list[int], vocab_size: int) -> float:
    """The same by dictionaries, pair by pair."""
    pairs, firsts, tokens = Counter(pairwise(train)), Counter(train[:-1]), Counter(train)
    losses = []
    for s in STRENGTHS:
        p = {b: (tokens[b] + 1) / (len(train) + vocab_size) for b in set(held_out)}
        each = [(pairs[a, b] + s * p[b]) / (firsts[a] + s) for a, b in pairwise(held_out)]
        losses.append(-sum(map(math.log, each)) / len(each))
    return min(losses)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=90),
    st.lists(st.integers(0, 6), min_size=2, max_size=60),
    st.integers(7, 9),
    st.sampled_from([7, 16, 1000]),
    st.sampled_from([0, 1000]),
)
def test_the_loss_is_that_of_counting_pair_by_pair(
    train: list[int], held_out: list[int], vocab_size: int, chunk: int, dense: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "CHUNK", chunk)  # pairs across chunks count once
        patch.setattr(bigram, "DENSE", dense)  # 0: only the pairs of the held-out text are counted
        found = bigram_loss(np.array(train, np.uint16), np.array(held_out, np.uint16), vocab_size)
    assert found == pytest.approx(counted(train, held_out, vocab_size), rel=1e-12)


def test_the_smoothed_probabilities_of_the_next_token_add_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "STRENGTHS", np.array([2.5]))
    train = np.array([0, 1, 1, 2, 0, 1, 4, 3])
    for a in range(6):  # 5 never occurs
        p = [math.exp(-bigram_loss(train, np.array([a, b]), 6)) for b in range(6)]
        assert sum(p) == pytest.approx(1, rel=1e-12)


def test_a_text_of_pure_chance_has_the_entropy_of_chance_and_a_cycle_none() -> None:
    rng = np.random.default_rng(0)
    assert bigram_loss(rng.integers(0, 4, 200_000), rng.integers(0, 4, 20_000), 4) == pytest.approx(
        math.log(4), rel=1e-3
    )
    assert bigram_loss(np.arange(100_000) % 5, np.arange(1000) % 5, 5) < 1e-4


def test_a_large_vocabulary_does_not_make_the_yardstick_its_own_entropy() -> None:
    """The entropy of few tokens of many kinds is near 0, and no model reaches it on other text."""
    rng = np.random.default_rng(0)
    tokens = rng.zipf(1.3, 40_000) % 5000
    loss = bigram_loss(tokens[:36_000], tokens[36_000:], 5000)
    p = np.bincount(tokens, minlength=5000) / len(tokens)
    unigram = -(p[p > 0] * np.log(p[p > 0])).sum()
    assert unigram < loss < unigram + 0.5  # independent draws: nothing is better than the frequencies


def test_only_the_first_tokens_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "MEASURED", 3)
    train = np.array([0, 1] * 20)
    assert bigram_loss(train, np.array([0, 1, 0, 1, 1, 1, 1]), 2) == bigram_loss(train, np.array([0, 1, 0, 1]), 2)


def test_memory_does_not_grow_with_the_training_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram, "CHUNK", 1 << 12)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5000, 1 << 19).astype(np.uint16)  # almost all pairs are different

    def peak(train: np.ndarray) -> int:
        tracemalloc.start()
        bigram_loss(train, tokens[:2000], 5000)
        out = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return out

    peak(tokens[:5000])
    assert peak(tokens) < 1.2 * peak(tokens[: 1 << 13])
