"""The study's numbers about training are the library's, and bad input is rejected with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.attribution import attribute
from onfoot.explore import default_model, texts
from onfoot.explore.study import MAX_PARAMS, Study, check_model
from onfoot.explore.walk import small_model
from onfoot.models.model import Model
from onfoot.models.params import TOKEN_TABLE


def test_the_default_model_is_small_trained_and_predicts(model: Model, study: Study) -> None:
    files = list(default_model.FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) < 300_000
    assert study.loss < 1.0 < np.log(model.config.vocab_size)  # far below what guessing would give


def test_the_map_has_every_step_of_table_2_and_of_table_1(study: Study) -> None:
    plain = [step.name for step in study.steps if step.head is None]
    names = [row.layer for row in onfoot.tables.table_2(study.model.config)]
    block = names.index("LayerNorm 1"), names.index("Skip 2") + 1
    assert plain == [*names[: block[0]], *2 * names[block[0] : block[1]], *names[block[1] :], "Loss"]
    for b in range(2):
        for h in range(4):
            assert len([s for s in study.steps if s.block == b and s.head == h]) == 9


def test_the_shares_of_skip_and_branch_are_projections_that_add_up_to_one(study: Study) -> None:
    forks = study.training["forks"]
    assert [(fork["block"], fork["at"]) for fork in forks] == [(1, "Δ_5"), (1, "Δ_1"), (0, "Δ_5"), (0, "Δ_1")]
    trace = study.context.trace
    for fork in forks:
        d = trace.blocks[fork["block"]].delta
        skip, whole = (d[10], d[5]) if fork["at"] == "Δ_5" else (d[5], d[1])
        assert fork["skip_share"] == pytest.approx(float((skip * whole).sum() / (whole * whole).sum()), rel=1e-12)
        assert fork["skip_share"] + fork["branch_share"] == pytest.approx(1, abs=1e-12)


def test_the_two_parts_of_the_tied_gradient_add_up(study: Study) -> None:
    parts = [study.tensors.value(f"∂w_tok, as {part}") for part in ("embedding", "logits")]
    assert np.allclose(sum(parts), study.context.trace.grads[TOKEN_TABLE], rtol=0, atol=1e-14)
    tied = study.training["tied"]
    assert sum(tied["shares"].values()) == pytest.approx(1, abs=1e-12)
    assert tied["rows_embedding"] == len(set(study.tokens[0].tolist()))
    assert tied["rows_logits"] == study.model.config.vocab_size


def test_the_drivers_of_every_parameter_add_up_to_its_gradient(study: Study) -> None:
    shares = study.tensors.value(study.training["drivers"])
    assert shares.shape == (len(study.model.params), study.tokens.shape[1])
    assert np.allclose(shares.sum(axis=1), 1, atol=1e-10)
    assert not shares[:, -1].any()  # the last token has no target, so no loss


def test_norms_by_depth_and_token_are_those_of_the_trace(study: Study) -> None:
    norms = study.tensors.value(study.training["signal_norms"])
    trace = study.context.trace
    assert np.allclose(norms[0], np.linalg.norm(trace["Δ_12"][0], axis=-1))
    assert np.allclose(norms[-1], np.linalg.norm(trace["Δ_1", 0][0], axis=-1))
    assert not norms[:, -1].any()


def test_attribution_is_the_librarys(study: Study) -> None:
    result, right = study.training["attribution"], attribute(study.model, study.tokens[0], n_swaps=1000)
    assert result["contributions"] == right.contributions.tolist()
    changes = {(swap.position, swap.new): (swap.predicted, swap.actual) for swap in right.swaps}
    for swap in result["swaps"]:
        assert (swap["predicted"], swap["actual"]) == pytest.approx(
            changes[swap["position"], swap["new"]], rel=1e-9, abs=1e-12
        )


def test_the_optimizers_steps_are_adamws(study: Study, model: Model) -> None:
    result = study.optimizer(2e-3, 3)
    own = Model(model.config, model.params, "float64", "numpy")
    optimizer = onfoot.AdamW(own, lr=2e-3)
    losses = [own.train_step(optimizer, study.tokens) for _ in range(3)] + [own.loss(study.tokens)]
    assert result["losses"] == losses
    row = next(row for row in result["parameters"] if row["name"] == "transformer.h.0.attn.c_proj.weight")
    assert np.array_equal(study.tensors.value(row["arrays"]["new"]), own.params[row["name"]])
    assert np.array_equal(study.tensors.value(row["arrays"]["v"]), optimizer.v[row["name"]])


def test_a_small_step_changes_the_loss_as_predicted_to_first_order(study: Study) -> None:
    result = study.optimizer(1e-7, 1)
    assert result["actual"] == pytest.approx(result["predicted"], rel=2e-3)


@pytest.mark.parametrize(("lr", "steps"), [(0.0, 1), (-1.0, 1), (2.0, 1), (1e-3, 0), (1e-3, 21)])
def test_steps_out_of_bounds_are_refused(study: Study, lr: float, steps: int) -> None:
    with pytest.raises(ValueError, match=r"(lr|steps) must be"):
        study.optimizer(lr, steps)


def test_the_number_of_cached_steps_is_bounded(tokens: np.ndarray) -> None:
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=9)
    study = Study(small_model(config, 0), np.array([[1, 2, 3]]))
    for n in range(60):
        study.optimizer(1e-4 * (n + 1), 1)
    kept = [tensor.id for tensor in study.tensors if tensor.id.startswith("step ")]
    assert 0 < len(kept) <= 20 * 6 * len(study.model.params)


def test_the_gradient_of_d_is_0_at_the_start_of_lora_and_not_after_a_step(study: Study) -> None:
    for layer in study.lora["layers"]:
        first, second = (state["norms"] for state in layer["states"][:2])
        assert first["u"] == 0 and first["∂d"] == 0 and first["∂u"] > 0 and first["d"] > 0
        assert second["u"] > 0 and second["∂d"] > 0
        assert not study.tensors.value(layer["states"][0]["arrays"]["∂d"]).any()


def test_training_a_copy_does_not_change_the_study(study: Study) -> None:
    before = study.model.loss(study.tokens)
    study.optimizer(1e-2, 2), study.lora
    assert study.model.loss(study.tokens) == before == study.loss


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        ("   ", "the text is empty"),
        ("a", "at least two tokens are needed, .* got 1"),
        ("a" * 65, "65 tokens exceed the limit of 64"),
        ("a" * 5000, "5,000 characters, the limit is 4,000"),
        ("a 7", "the character '7' is not in"),
    ],
)
def test_bad_texts_are_refused_with_the_reason(model: Model, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        texts.read_text(model, text)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("", "no token ids"),
        ("1", "at least two tokens are needed, .* got 1"),
        ("1 37", "token id must be between 0 and 36, got 37"),
        ("1 -2", "token id must be between 0 and 36, got -2"),
        ("1 99999999999999999999999", "must be between 0 and 36, got 99999999999999999999999"),
        ("1 two", "'two' is not an integer"),
        ("1 " * 65, "65 tokens"),
    ],
)
def test_bad_ids_are_refused_with_the_reason(model: Model, ids: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        texts.read_ids(model, ids)


def test_a_model_without_a_tokenizer_takes_ids() -> None:
    model = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=9), 0, "float64")
    assert texts.read_ids(model, "1, 2 3").tolist() == [[1, 2, 3]]
    with pytest.raises(ValueError, match="has no tokenizer; give token ids"):
        texts.read_text(model, "abc")


def test_tokens_are_shown_in_printable_form(model: Model) -> None:
    shown = texts.vocabulary(model)
    assert shown[0] == "␣" and "a" in shown and all(shown)


def test_a_large_vocabulary_is_shown_by_the_rows_that_matter() -> None:
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=5000)
    study = Study(small_model(config, 0), np.array([[7, 4999, 7, 3]]))
    gradient = study.tensors["∂w_tok"]
    assert gradient.rows is not None and {3, 7, 4999} <= set(gradient.rows.tolist())
    assert len(gradient.rows) < 80
    assert np.abs(study.tensors.sum_of_terms("∂w_tok") - gradient.value).max() < 1e-13
    assert study.differences("tok")["∂w_tok"]["passed"]


def test_without_pytorch_gradients_are_checked_by_finite_differences_only(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(model, texts.read_text(model, "the name"))
    monkeypatch.setitem(vars(study), "autograd_installed", False)
    assert study.document["model"]["autograd"] is False
    assert study.autograds("embedding") == {} and study.differences("embedding")["Δ_1"]["passed"]


def test_models_that_the_page_cannot_show_are_refused() -> None:
    class Large:
        config = onfoot.GPT2Config()
        n_params = MAX_PARAMS + 1

    large: Any = Large()
    with pytest.raises(ValueError, match=f"explore supports up to {MAX_PARAMS:,}"):
        check_model(large)
    large.config = type("Other", (), {"model_type": "rwkv"})()
    with pytest.raises(ValueError, match="explore shows GPT-2 and the LLaMA family, got a Other"):
        check_model(large)
