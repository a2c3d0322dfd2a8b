"""Attribution: gradient × input and first-order swaps, against the loss itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from onfoot.attribution import attribute
from onfoot.cli import app
from onfoot.config import GPT2Config
from onfoot.explore.walk import small_model
from onfoot.models.model import Model
from onfoot.models.params import TOKEN_TABLE

CONFIG = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=10, n_positions=8, tie_word_embeddings=False)
TEXT = [3, 1, 4, 0, 5, 9]  # no token twice


@pytest.fixture
def model() -> Model:
    return small_model(CONFIG, seed=3)


def test_a_contribution_is_the_derivative_of_the_loss_as_the_tokens_embedding_grows(model: Model) -> None:
    result = attribute(model, TEXT)
    table = model.params[TOKEN_TABLE].copy()
    for t, token in enumerate(TEXT):

        def loss(scale: float, token: int = token) -> float:
            model.params[TOKEN_TABLE] = table.copy()
            model.params[TOKEN_TABLE][token] *= scale
            return model.loss(np.array([TEXT]))

        np.testing.assert_allclose((loss(1 + 1e-5) - loss(1 - 1e-5)) / 2e-5, result.contributions[t], atol=1e-8)


def test_a_swaps_score_is_the_derivative_of_the_loss_towards_the_new_embedding(model: Model) -> None:
    with pytest.raises(ValueError, match=r"n_swaps must be >= 0, got -1"):
        attribute(model, TEXT, n_swaps=-1)
    swaps = attribute(model, TEXT, n_swaps=5).swaps
    table = model.params[TOKEN_TABLE].copy()
    for swap in swaps:

        def loss(eps: float, old: int = swap.old, new: int = swap.new) -> float:
            model.params[TOKEN_TABLE] = table.copy()
            model.params[TOKEN_TABLE][old] += eps * (table[new] - table[old])
            return model.loss(np.array([TEXT]))

        np.testing.assert_allclose((loss(1e-5) - loss(-1e-5)) / 2e-5, swap.predicted, rtol=1e-6)


def test_the_true_change_is_measured_with_the_targets_of_the_original_text(model: Model) -> None:
    targets = np.array([[*TEXT[1:], -100]])
    result = attribute(model, TEXT)
    assert result.loss == model.loss(np.array([TEXT]), targets)
    shifted = 0
    for swap in result.swaps:
        swapped = np.array([TEXT])
        assert swapped[0, swap.position] == swap.old
        swapped[0, swap.position] = swap.new
        assert swap.actual == model.loss(swapped, targets) - result.loss
        shifted += swap.actual != model.loss(swapped) - result.loss
    assert shifted  # with the swapped text's own targets it would be another number


def test_first_order_and_true_change_agree_where_embeddings_are_close() -> None:
    model = small_model(CONFIG, seed=3)
    table = model.params[TOKEN_TABLE]
    model.params[TOKEN_TABLE] = table[:1] + 1e-5 * table
    for swap in attribute(model, TEXT).swaps:
        np.testing.assert_allclose(swap.actual, swap.predicted, rtol=1e-3)


def test_swaps_are_the_best_of_all_most_promising_first(model: Model) -> None:
    every = attribute(model, TEXT, n_swaps=10_000).swaps
    assert len(every) == len(TEXT) * 9  # each position, each other token
    assert all(swap.old != swap.new for swap in every)
    predicted = [swap.predicted for swap in every]
    assert predicted == sorted(predicted)
    assert attribute(model, TEXT, n_swaps=4).swaps == every[:4]
    assert attribute(model, TEXT, n_swaps=0).swaps == []


def test_a_last_token_without_target_does_nothing(model: Model) -> None:
    result = attribute(model, TEXT, n_swaps=10_000)
    assert result.contributions[-1] == 0
    assert {swap.actual for swap in result.swaps if swap.position == len(TEXT) - 1} == {0.0}


def test_explicit_targets_are_used(model: Model) -> None:
    targets = [-100, -100, -100, -100, -100, 2]
    result = attribute(model, TEXT, targets)
    assert result.loss == pytest.approx(model.loss(np.array([TEXT]), np.array([targets])), rel=1e-14)
    assert result.contributions[-1] != 0


def test_a_batch_is_rejected(model: Model) -> None:
    with pytest.raises(ValueError, match="shape"):
        attribute(model, [TEXT, TEXT])


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["attribute", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_shows_bytes_contributions_and_swaps() -> None:
    out = run("--text", "é b", "--top", "3")
    assert "195  0xc3" in out
    assert "98  'b'" in out
    assert "Δ_0[t, id]" in out
    data = json.loads(run("--text", "é b", "--top", "3", "--format", "json"))
    assert data["tokens"] == [195, 169, 32, 98]
    assert len(data["contributions"]) == 4
    assert [set(swap) for swap in data["swaps"]] == [{"position", "old", "new", "predicted", "actual"}] * 3
    for swap in data["swaps"]:
        assert f"{swap['predicted']:+.6f}" in out
        assert f"{swap['actual']:+.6f}" in out


def test_the_command_takes_token_ids_and_sizes() -> None:
    data = json.loads(run("--tokens", "3 1 4 1 5", "--vocab-size", "10", "--n-layer", "1", "--format", "json"))
    assert data["tokens"] == [3, 1, 4, 1, 5]
    assert all(swap["new"] < 10 for swap in data["swaps"])
