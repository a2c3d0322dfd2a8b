"""Edge cases of sampling: inclusive limits, ties, and draws at both ends of the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from onfoot.generate.sampling import Sampling, next_token, penalise, probabilities
from oracles import assert_close

LOGITS = np.random.default_rng(3).normal(0, 3, 12)
IDS = torch.zeros((1, 1), dtype=torch.long)


@pytest.mark.parametrize("k", [1, 2, 11, 12, 40])
def test_top_k_keeps_exactly_k_up_to_all(k: int) -> None:
    expected = TopKLogitsWarper(k)(IDS, torch.tensor(LOGITS)[None]).softmax(-1)[0].numpy()
    found = probabilities(LOGITS, Sampling(top_k=k))
    assert_close(found, expected, 1e-12)
    assert np.count_nonzero(found) == min(k, 12)


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.9, 0.95, 0.999, 1.0])
def test_top_p_is_transformers_at_any_p(p: float) -> None:
    expected = TopPLogitsWarper(p)(IDS, torch.tensor(LOGITS)[None]).softmax(-1)[0].numpy()
    assert_close(probabilities(LOGITS, Sampling(top_p=p)), expected, 1e-12)


def test_tokens_exactly_as_likely_as_the_limit_are_kept() -> None:
    logits = np.array([2.0, 1.0, 2.0, 0.0])
    assert probabilities(logits, Sampling(min_p=1.0)).tolist() == [0.5, 0, 0.5, 0]
    assert_close(probabilities(logits, Sampling(min_p=0.0)), torch.tensor(logits).softmax(-1).numpy(), 1e-15)
    assert probabilities(np.zeros(4), Sampling(top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 4.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_penalty_comes_before_the_temperature(penalty: float, temperature: float) -> None:
    before = LOGITS.copy()
    for _ in range(20):
        seen = np.random.default_rng(1).integers(0, 12, 30)  # repeated tokens count once
        scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(seen)[None], torch.tensor(LOGITS)[None])[0]
        settings = Sampling(temperature, repetition_penalty=penalty)
        if temperature == 0:
            assert next_token(LOGITS, seen, settings, np.random.default_rng(0)) == int(scores.argmax())
        else:
            draws = [next_token(LOGITS, seen, settings, np.random.default_rng(i)) for i in range(50)]
            below = np.cumsum((scores / temperature).softmax(-1).numpy())
            assert draws == [int((below <= np.random.default_rng(i).random()).sum()) for i in range(50)]
    assert (before == LOGITS).all()  # the model's logits are unchanged


def test_penalties_do_not_modify_the_given_logits() -> None:
    logits = LOGITS.copy()
    assert penalise(logits, np.array([0, 1]), 2.0) is not logits and (logits == LOGITS).all()


class At:
    """A random generator that always draws the same number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    first: Any = At(0.0)
    assert next_token(np.array([0.0, 9.0, 5.0]), np.array([0]), Sampling(top_k=2), first) == 1
    last: Any = At(np.nextafter(1.0, 0.0))
    short = 0
    for seed in range(200):  # a draw can exceed the sum of probabilities, which rounding can make less than 1
        logits = np.append(np.random.default_rng(seed).normal(0, 1, 30), -50.0)
        settings = Sampling(top_k=30)
        short += np.cumsum(probabilities(logits, settings))[-1] < last.value
        assert next_token(logits, np.array([0]), settings, last) < 30
    assert short


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_logit_that_is_not_a_number_is_rejected(wrong: float) -> None:
    logits = LOGITS.copy()
    logits[5] = wrong
    with pytest.raises(ValueError, match="logits are not finite"):
        next_token(logits, np.array([0]), Sampling(), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"top_p": 1.0}, {"top_p": 0.0}),
        ({"min_p": 0.0}, {"min_p": -0.1}),
        ({"min_p": 1.0}, {"min_p": 1.1}),
        ({"top_k": 1}, {"top_k": 0}),
        ({"temperature": 0.0}, {"temperature": float("nan")}),
        ({"repetition_penalty": 0.1}, {"repetition_penalty": float("nan")}),
    ],
    ids=str,
)
def test_limits_are_inclusive_as_documented(good: dict[str, Any], bad: dict[str, Any]) -> None:
    Sampling(**good)
    [(name, value)] = bad.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        Sampling(**bad)


@pytest.mark.parametrize("size", [30, 300, 5000, 20000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_top_p_of_a_large_vocabulary_is_that_of_all_tokens_sorted(size: int, spread: float) -> None:
    rng = np.random.default_rng(size)
    logits = np.round(rng.normal(0, spread, size), 2).astype(np.float32)  # with ties
    whole = np.exp(logits.astype(np.float64) - logits.max())
    whole /= whole.sum()
    order = np.argsort(-whole, kind="stable")
    for top_p in (0.05, 0.5, 0.9, 0.999):
        right = np.zeros(size)
        kept = order[: int(np.searchsorted(np.cumsum(whole[order]), top_p)) + 1]
        right[kept] = whole[kept]
        np.testing.assert_allclose(probabilities(logits, Sampling(top_p=top_p)), right / right.sum(), rtol=1e-9)
