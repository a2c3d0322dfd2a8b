"""The Mistakes view: correct pieces give the network's gradients, wrong ones are shown and diagnosed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import onfoot
from onfoot.explore import mistakes
from onfoot.explore.study import Study
from onfoot.explore.walk import small_model

TOKENS = np.array([[3, 1, 4, 1, 5]])
PLAIN = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=9, vocab_size=11)


@pytest.fixture(scope="module")
def plain() -> Study:
    return Study(small_model(PLAIN, 0), TOKENS)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False, "lm_head_bias": True}, {"causal": False, "n_layer": 1}],
    ids=["tied", "untied", "not causal"],
)
def test_the_pieces_of_the_checker_make_up_the_networks_backward_pass(changes: dict[str, object]) -> None:
    m = Study(small_model(replace(PLAIN, **changes), 0), TOKENS).context  # type: ignore[arg-type]
    backward = mistakes.Backward(m, mistakes.network_pieces())
    rows = list(mistakes._rows(m, backward))
    assert set(backward.grads) == set(m.params)
    assert len(rows) == len(m.params) + 3 + 8 * m.config.n_layer
    assert max(row["error"] for row in rows) < 1e-12


def test_every_mistake_has_an_error_or_a_problem_for_every_gradient(plain: Study) -> None:
    for mistake in mistakes.possible(plain.context):
        try:
            backward = mistakes.Backward(plain.context, mistakes.network_pieces(mistake))
        except (ValueError, IndexError):
            continue  # shapes that do not fit
        rows = list(mistakes._rows(plain.context, backward))
        assert len(rows) == len(plain.model.params) + 19, mistake.name
        assert all(row["problem"] or row["error"] >= 0 for row in rows), mistake.name


@pytest.mark.parametrize(
    ("key", "first", "right_before"),
    [
        ("attention: the mean in place of the weighted sum", ("Δ_scaled", 1), {"Δ_12", "Δ_11", "Δ_3"}),
        ("layer_norm: γ outside the means", ("Δ_10", 1), {"Δ_12", "Δ_11"}),
        ("gelu: tanh-GELU with erf's derivative", ("Δ_7", 1), {"Δ_10", "Δ_8"}),
        ("block: the skip connection around attention missing", ("Δ_10", 0), {"Δ_12", "Δ_2"}),
        ("tied_embedding: only the gradient through the logits", ("transformer.wte.weight", None), {"Δ_12", "Δ_1"}),
    ],
)
def test_a_mistake_shows_where_it_occurs_and_below(
    plain: Study, key: str, first: tuple[str, int | None], right_before: set[str]
) -> None:
    found = plain.mistake(key)
    wrong = [row for row in found["rows"] if row["wrong"]]
    assert (wrong[0]["name"], wrong[0]["block"]) == first
    at = found["rows"].index(wrong[0])
    assert right_before <= {row["name"] for row in found["rows"][:at]}
    assert found["diagnosis"]["found"]
    assert found["loss_wrong"] != found["loss_right"]
    assert -1 <= found["cosine"] < 1


def test_a_mistake_that_one_sequence_cannot_show_is_still_diagnosed(plain: Study) -> None:
    found = plain.mistake("linear: dweight of a single sequence")
    assert not any(row["wrong"] for row in found["rows"])
    assert found["diagnosis"]["found"] and found["diagnosis"]["wrong"] == ["dweight"]


def test_shape_mismatches_are_reported(plain: Study) -> None:
    found = plain.mistake("attention: dk transposed")
    assert found["runs"] is False and "must match" in found["message"]
    as_matrix = plain.mistake("layer_norm: dweight as a diagonal matrix")
    problems = [row["problem"] for row in as_matrix["rows"] if row["problem"]]
    assert problems and all(problem.startswith("shape (8, 8)") for problem in problems)


def test_every_featured_mistake_is_in_the_catalogue(study: Study) -> None:
    listed = mistakes.catalogue(study.context, featured=True)
    names = {one["name"] for group in listed["groups"] for one in group["mistakes"]}
    assert names == set(mistakes.FEATURED)
    everything = mistakes.catalogue(study.context)
    assert sum(len(group["mistakes"]) for group in everything["groups"]) > 80


def test_networks_that_are_not_plain_gpt2_are_refused() -> None:
    study = Study(small_model(replace(PLAIN, activation_function="relu"), 0), TOKENS)
    with pytest.raises(ValueError, match="needs GPT-2's blocks"):
        study.mistakes()
    with pytest.raises(KeyError, match="unknown mistake"):
        Study(small_model(PLAIN, 0), TOKENS).mistake("attention: none such")
