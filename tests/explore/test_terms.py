"""Every number on the page is the sum of its terms, and every gradient check passes, for every kind of network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onfoot import engine
from onfoot.config import GPT2Config
from onfoot.explore.sources import lines_of
from onfoot.explore.study import Study
from onfoot.explore.terms import dot, evaluate, product
from onfoot.explore.walk import small_model
from onfoot.models.model import Model
from onfoot.ops.attention import attention_backward
from onfoot.ops.layer_norm import layer_norm_backward

TOKENS = np.array([[3, 1, 4, 1, 5]])
SMALL = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=9, vocab_size=11)
VARIANTS = {
    "tied": SMALL,
    "untied with a bias": replace(
        SMALL, n_layer=1, tie_word_embeddings=False, lm_head_bias=True, activation_function="gelu"
    ),
    "not causal": replace(SMALL, causal=False, n_layer=1, activation_function="relu"),
    "heads of two widths": replace(SMALL, n_layer=1, n_embd=6, n_head=3, head_dim=3, qk_head_dim=5, n_inner=7),
}


@pytest.fixture(scope="module", params=VARIANTS)
def small(request: pytest.FixtureRequest) -> Study:
    return Study(small_model(VARIANTS[request.param], 0), TOKENS)


def test_every_cell_of_every_array_is_the_sum_of_its_terms(small: Study) -> None:
    explained = [tensor for tensor in small.tensors if tensor.terms]
    assert len(explained) > 90
    for tensor in explained:
        finite = np.isfinite(tensor.value)
        with np.errstate(invalid="ignore"):
            missed = np.abs(small.tensors.sum_of_terms(tensor.id) - tensor.value)[finite]
        assert missed.max() < 1e-13, tensor.id


def test_a_wrong_term_is_noticed(small: Study) -> None:
    tensor = small.tensors["Δ_1"]
    right, tensor.terms = tensor.terms, tensor.terms[:-1]
    try:
        assert np.abs(small.tensors.sum_of_terms("Δ_1") - tensor.value).max() > 1e-4
    finally:
        tensor.terms = right


def test_every_error_signal_and_every_parameter_has_terms_and_a_formula(small: Study) -> None:
    shown = {id for step in small.steps for id in (step.forward, step.backward) if id is not None}
    gradients = {gradient for step in small.steps for _, gradient in step.parameters}
    without = {"a_0", "0.a_3", "1.a_3"}  # given, and put together from the heads
    for id in (shown | gradients) - without:
        assert small.tensors[id].terms, id
        assert small.tensors[id].formula.text, id


def test_the_parameters_of_the_map_are_those_of_the_model(small: Study) -> None:
    named = {small.tensors[gradient].parameter for step in small.steps for _, gradient in step.parameters}
    assert named == set(small.model.params)


def test_every_gradient_agrees_with_a_finite_difference_and_with_autograd(small: Study) -> None:
    measured = {id: one for step in small.steps for id, one in small.differences(step.id).items()}
    differentiated = {id: one for step in small.steps for id, one in small.autograds(step.id).items()}
    assert set(measured) == set(differentiated) == {tensor.id for tensor in small.tensors if tensor.is_gradient}
    assert [id for id, one in measured.items() if not one["passed"]] == []
    assert [id for id, one in differentiated.items() if not one["passed"]] == []


def wrong_attention(dy: Any, saved: Any) -> Any:
    dq, dk, dv = attention_backward(dy, saved)
    return 1.001 * dq, dk, dv


def wrong_norm(dy: Any, saved: Any) -> Any:
    dx, dweight, dbias = layer_norm_backward(dy, saved)
    return dx + 1e-4, dweight, dbias


@pytest.mark.parametrize(("name", "wrong"), [("attention", wrong_attention), ("layer_norm", wrong_norm)])
def test_a_planted_mistake_turns_badges_red(name: str, wrong: Any) -> None:
    right = small_model(SMALL, 0)
    broken = engine.Engine("numpy", {**engine.OPS, f"{name}_backward": wrong}, np.asarray)
    study = Study(Model(SMALL, right.params, "float64", broken), TOKENS)
    differences = [one for step in study.steps for one in study.differences(step.id).values()]
    autograds = [one for step in study.steps for one in study.autograds(step.id).values()]
    assert any(one["passed"] for one in differences) and any(one["passed"] for one in autograds)
    assert sum(not one["passed"] for one in differences) > 5
    assert sum(not one["passed"] for one in autograds) > 5


def test_a_proof_leaves_the_models_parameters_alone(small: Study) -> None:
    before = {name: value.copy() for name, value in small.model.params.items()}
    small.differences("embedding"), small.differences("tok")
    assert all(np.array_equal(before[name], small.model.params[name]) for name in before)


def test_every_step_has_its_lines_in_the_source(study: Study) -> None:
    shown = {id for step in study.steps for id in (step.forward, step.backward)} - {None, "a_0"}
    assert len(shown) > 50
    for id in shown:
        tensor = study.tensors[id]
        assert lines_of(tensor.symbol, tensor.formula.equations), id
    (line,) = lines_of("Δ_5", ("NET.1",))
    assert line["file"] == "onfoot/models/gpt2.py" and line["code"].startswith("d5 = ")


def test_terms_are_products_and_sums_of_cells() -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    arrays = {"a": a, "b": b, "row": np.array([2.0, 4.0]), "column": np.array([1.0, 2.0, 3.0]), "one": np.array(5.0)}
    of = arrays.__getitem__
    assert np.allclose(evaluate(dot("", "j", ("a", "rj"), ("b", "cj"), sign=-1), (2, 4), of), -a @ b.T)
    assert np.allclose(evaluate(product("", ("row", "r"), ("column", "c")), (2, 3), of), np.outer([2, 4], [1, 2, 3]))
    assert np.allclose(evaluate(product("", ("one", "")), (2, 3), of), 5)
