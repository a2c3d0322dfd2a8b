"""L_seq and L_batch: what is summed, what is not, and which mean is taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onfoot
import oracles
from onfoot.models.model import Model

TOKENS = np.array([[5, 12, 3, 7, 3, 1, 0], [2, 5, 5, 2, 0, 12, 9], [1, 1, 4, 6, 8, 10, 3]])


def random_model() -> Model:
    config = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=9, vocab_size=13)
    params = oracles.scrambled(dict(onfoot.create(config, dtype="float64", engine="numpy").params), 0)
    return Model(config, params, "float64", "numpy")


def test_error_signals_of_a_batch_are_those_of_its_sequences() -> None:
    model = random_model()
    whole = model.trace(TOKENS)
    for s in range(3):
        alone = model.trace(TOKENS[s : s + 1])
        for block in (0, 1):
            for name in [f"Δ_{i}" for i in range(1, 11)]:
                expected = alone[name, block][0] * 6 / 18  # the traces' losses are means over 6 and over 18 targets
                np.testing.assert_allclose(whole[name, block][s], expected, atol=1e-14, err_msg=name)
            np.testing.assert_allclose(whole["ρ", block][s], alone["ρ", block][0], atol=1e-14)


def test_the_mean_over_tokens_is_not_the_mean_of_the_sequences_means() -> None:
    model = random_model()
    targets = np.concatenate([TOKENS[:, 1:], np.full((3, 1), -100)], axis=1)
    targets[0, 2:], targets[1, 5:] = -100, -100  # 2, 5 and 6 targets
    logits = torch.from_numpy(model.logits(TOKENS))
    losses = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="none")
    sums = losses.reshape(3, 7).sum(dim=1).numpy()
    assert model.loss(TOKENS, targets) == pytest.approx(sums.sum() / 13, rel=1e-12)
    means = (sums / [2, 5, 6]).mean()
    assert abs(model.loss(TOKENS, targets) - means) > 0.01
    weights = np.array([1 / 2, 1 / 5, 1 / 6]) / 3 * 13  # of a token, relative to the mean over tokens
    assert weights[0] > 2 and weights[2] < 1
    equal = np.where(np.arange(7) < 3, TOKENS[:, [1, 2, 3, 4, 5, 6, 0]], -100)  # 3 targets in each
    by_sequence = [model.loss(TOKENS[s : s + 1], equal[s : s + 1]) for s in range(3)]
    assert model.loss(TOKENS, equal) == pytest.approx(np.mean(by_sequence), rel=1e-12)
