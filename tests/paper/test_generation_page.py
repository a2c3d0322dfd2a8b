"""Drawing tokens: what temperature does to the entropy, what top-p keeps, what the probability of a text is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onfoot
from onfoot.generate.sampling import Sampling, probabilities


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


@pytest.mark.parametrize("seed", range(4))
def test_the_entropy_grows_with_the_temperature_at_the_rate_of_the_variance(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 20)
    previous, ranking = -1.0, np.argsort(logits)
    for temperature in np.geomspace(0.05, 100, 40):
        p = probabilities(logits, Sampling(temperature=temperature))
        assert np.array_equal(np.argsort(p[ranking], kind="stable"), np.arange(20))  # the order stays
        assert entropy(p) > previous
        previous, h = entropy(p), 1e-4 * temperature
        around = [entropy(probabilities(logits, Sampling(temperature=temperature + s * h))) for s in (1, -1)]
        variance = (p * logits**2).sum() - (p * logits).sum() ** 2
        assert (around[0] - around[1]) / (2 * h) == pytest.approx(variance / temperature**3, rel=1e-4, abs=1e-9)
    assert previous == pytest.approx(np.log(20), rel=1e-3)  # nearly uniform
    assert probabilities(logits, Sampling(temperature=0.01)).max() > 1 - 1e-6  # nearly greedy


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.6, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_of_that_probability(top_p: float) -> None:
    logits = np.random.default_rng(0).normal(0, 2, 9)
    p = torch.from_numpy(logits).softmax(-1).numpy()
    kept = np.flatnonzero(probabilities(logits, Sampling(top_p=top_p)))
    assert p[kept].sum() >= top_p
    smaller = [p[list(some)].sum() for some in combinations(range(9), len(kept) - 1)]
    assert max(smaller) < top_p  # no smaller set reaches it
    same_size = [p[list(some)].sum() for some in combinations(range(9), len(kept))]
    assert p[kept].sum() == pytest.approx(max(same_size), rel=1e-12)
    np.testing.assert_allclose(probabilities(logits, Sampling(top_p=top_p))[kept], p[kept] / p[kept].sum(), rtol=1e-12)


def test_the_log_probability_of_a_continuation_is_minus_the_sum_of_its_losses() -> None:
    config = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=12, vocab_size=11)
    model = onfoot.create(config, seed=1, dtype="float64")
    prompt = np.array([[3, 1, 4]])
    text = model.generate(prompt, max_new_tokens=6, temperature=1.3, seed=5)
    step_by_step = 0.0
    for t in range(3, 9):  # the probability of each token, given only what is before it
        p = probabilities(model.logits(text[:, :t])[0, -1], Sampling())
        step_by_step += np.log(p[text[0, t]])
    targets = np.concatenate([text[:, 1:], [[-100]]], axis=1)
    targets[:, :2] = -100  # the prompt is given
    assert model.loss_and_grads(text, targets, divisor=1)[0] == pytest.approx(-step_by_step, rel=1e-12)
    logits = torch.from_numpy(model.logits(text))[0, 2:-1]
    assert F.cross_entropy(logits, torch.from_numpy(text[0, 3:]), reduction="sum").item() == pytest.approx(
        -step_by_step, rel=1e-12
    )
