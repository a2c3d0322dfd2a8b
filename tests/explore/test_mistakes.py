"""The Mistakes view: correct pieces give the network's gradients, wrong ones are shown and diagnosed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import onfoot
from llama_oracle import scrambled_llama
from onfoot.config import RopeScaling
from onfoot.explore import mistakes
from onfoot.explore.autograd import Autograd
from onfoot.explore.glossary import PAPER, find, symbols_of
from onfoot.explore.mistake_formulas import FORMULAS
from onfoot.explore.study import Study
from onfoot.explore.study_context import StudyContext
from onfoot.explore.walk import small_model
from onfoot.explore.wrong_backward import Backward

TOKENS = np.array([[3, 1, 4, 1, 5]])
PLAIN = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=9, vocab_size=11)


@pytest.fixture(scope="module")
def plain() -> Study:
    return Study(small_model(PLAIN, 0), TOKENS)


def rows_in(m: StudyContext, backward: Backward) -> list[dict[str, Any]]:
    return [row for row, _, _ in mistakes.rows_of(m, backward, mistakes.NEXT_LAYER[m.family])]


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False, "lm_head_bias": True}, {"causal": False, "n_layer": 1}],
    ids=["tied", "untied", "not causal"],
)
def test_the_pieces_of_the_checker_make_up_the_networks_backward_pass(changes: dict[str, object]) -> None:
    m = Study(small_model(replace(PLAIN, **changes), 0), TOKENS).context  # type: ignore[arg-type]
    backward = mistakes.backward_of(m)
    rows = rows_in(m, backward)
    assert set(backward.grads) == set(m.params)
    assert len(rows) == len(m.params) + 3 + 8 * m.config.n_layer
    assert max(row["error"] for row in rows) < 1e-12


def test_every_mistake_has_an_error_or_a_problem_for_every_gradient(plain: Study) -> None:
    for mistake in mistakes.possible(plain.context):
        try:
            backward = mistakes.backward_of(plain.context, mistake)
        except (ValueError, IndexError):
            continue  # shapes that do not fit
        rows = rows_in(plain.context, backward)
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


# --- the LLaMA family ---

LLAMA = onfoot.LlamaConfig(
    vocab_size=13, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Study:
    return Study(scrambled_llama(LLAMA, 0), TOKENS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2},
        {"model_type": "qwen3", "head_dim": 6, "num_key_value_heads": 4},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "num_key_value_heads": 1},
    ],
    ids=["tied", "biases", "norms of heads", "scaled positions"],
)
def test_the_pieces_make_up_the_backward_pass_of_the_llama_family(changes: dict[str, Any]) -> None:
    if "rope_scaling" in changes:
        changes = {**changes, "rope_scaling": RopeScaling(**changes["rope_scaling"])}
    model = scrambled_llama(replace(LLAMA, **changes), 0)
    m = Study(model, TOKENS).context
    backward = mistakes.backward_of(m)
    rows = rows_in(m, backward)
    assert set(backward.grads) == set(m.params)
    assert len(rows) == len(m.params) + 3 + 9 * m.config.n_layer
    assert max(row["error"] for row in rows) < 1e-12
    autograd = Autograd(model, TOKENS, m.targets, m.divisor)
    for name in m.params:
        np.testing.assert_allclose(backward.grads[name], autograd.parameter(name), rtol=1e-8, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("key", "first", "right_before"),
    [
        ("rms_norm: the root mean square held constant", ("Δ_10", 1), {"Δ_12", "Δ_11", "model.norm.weight"}),
        ("rms_norm: dweight from x in place of x̂", ("model.norm.weight", None), {"Δ_12", "Δ_11"}),
        ("rope: rotated forward again", ("model.layers.1.self_attn.k_proj.weight", 1), {"Δ_3", "Δ_scaled"}),
        ("rope_attention: dq not rotated back", ("model.layers.1.self_attn.q_proj.weight", 1), {"Δ_scaled"}),
        ("swiglu: up missing from dgate", ("Δ_g", 1), {"Δ_10", "Δ_8"}),
        ("swiglu: σ(gate) in place of silu(gate) in dup", ("Δ_u", 1), {"Δ_8", "Δ_g"}),
        (
            "grouped_query_attention: dk and dv averaged over the group",
            ("model.layers.1.self_attn.v_proj.weight", 1),
            {"Δ_3", "Δ_scaled"},
        ),
        ("block: the skip connection around the MLP missing", ("Δ_5", 1), {"Δ_6", "Δ_u"}),
        ("tied_embedding: only the gradient through the logits", ("model.embed_tokens.weight", None), {"Δ_1"}),
    ],
)
def test_a_mistake_in_a_llama_shows_where_it_occurs(
    llama: Study, key: str, first: tuple[str, int | None], right_before: set[str]
) -> None:
    found = llama.mistake(key)
    wrong = [row for row in found["rows"] if row["wrong"]]
    assert (wrong[0]["name"], wrong[0]["block"]) == first
    assert right_before <= {row["name"] for row in found["rows"][: found["rows"].index(wrong[0])]}
    assert found["diagnosis"]["found"] and found["loss_wrong"] != found["loss_right"]
    assert -1 <= found["cosine"] < 1


def test_the_catalogue_of_a_llama_has_its_layers_and_no_others(llama: Study) -> None:
    groups = {group["name"]: group["mistakes"] for group in llama.mistakes()["groups"]}
    assert {"RMS norm", "RoPE", "Attention with RoPE", "Grouped queries", "SwiGLU"} <= set(groups)
    assert not {"Layer norm", "GELU"} & set(groups)
    assert not any("dbias" in one["name"] for one in groups["Linear layers"])  # it has no biases
    listed = mistakes.catalogue(llama.context, featured=True)
    assert {one["name"] for group in listed["groups"] for one in group["mistakes"]} == set(mistakes.FEATURED_LLAMA)
    alone = Study(scrambled_llama(replace(LLAMA, num_key_value_heads=4), 0), TOKENS)
    assert "Grouped queries" not in {group["name"] for group in alone.mistakes()["groups"]}


def test_a_mistake_that_is_hidden_in_one_block_of_a_llama_begins_there(llama: Study) -> None:
    hidden = [llama.exercise("mistake", number) for number in range(6)]
    for one in hidden:
        rows, answer = one["rows"], one["answer"]
        assert rows[answer]["wrong"] and not any(row["wrong"] for row in rows[:answer])
    assert {0, 1} <= {one["block"] for one in hidden}
    in_block_0 = [row for one in hidden if one["block"] == 0 for row in one["rows"]]
    above = [row["wrong"] for row in in_block_0 if row["block"] == 1]
    assert above and not any(above)


def test_a_window_shorter_than_the_text_is_refused() -> None:
    config = replace(LLAMA, model_type="mistral", sliding_window=3)
    with pytest.raises(ValueError, match="a window of this model is shorter than the 5 tokens"):
        Study(scrambled_llama(config, 0), TOKENS).mistakes()


def test_the_equations_that_mistakes_violate_are_formulas_whose_every_symbol_is_explained(study: Study) -> None:
    config = onfoot.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=32, attention_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    llama = Study(scrambled_llama(config, 0), np.array([[3, 1, 4, 1, 5]]))
    ids = {mistake.equation for one in (study, llama) for mistake in mistakes.possible(one.context)}
    assert len(ids) > 30 and sorted(id for id in ids if id not in FORMULAS) == []
    missing = {symbol: text for text in FORMULAS.values() for symbol in symbols_of(text) if find(symbol) is None}
    assert missing == {}


def test_the_page_names_the_paper_of_a_violated_equation_and_explains_its_symbols(page: Any) -> None:
    page.locator("#tab-mistakes").click()
    page.wait_for_selector(".mistake-result[aria-busy=false] .pairs .formula math")
    assert page.locator(".mistake-result .pairs dt").first.inner_text() == "violates eq 40"
    assert page.locator(".mistake-result .pairs dd .aside").first.inner_text() == f"equation 40 of {PAPER}"
    page.locator(".mistake-result .pairs .formula mi", has_text="σ").hover()
    page.wait_for_selector("#gloss-tip")
    assert "standard deviation" in page.locator("#gloss-tip").inner_text()
