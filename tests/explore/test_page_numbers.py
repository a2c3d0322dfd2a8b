"""Every number in the page and the exported file, computed independently: with PyTorch or by hand."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onfoot
from onfoot.explore import export_size, texts
from onfoot.explore import page as page_module
from onfoot.explore import server as server_module
from onfoot.explore.describe import describe, encoded, where_parts
from onfoot.explore.embedding_logits import EXTRA_ROWS
from onfoot.explore.export_size import plan_export
from onfoot.explore.mistakes import apply_mistake, catalogue
from onfoot.explore.page import export
from onfoot.explore.proof import differentiated, relative_error
from onfoot.explore.sources import lines_of
from onfoot.explore.study import LARGE, MAX_PARAMS, Study, check_model, study_key
from onfoot.explore.tensors import Tensor, Tensors
from onfoot.explore.terms import Factor, dot, product
from onfoot.explore.walk import small_model
from onfoot.models.model import Model
from oracles import gpt2_logits, gpt2_loss_and_grads

CONFIG = onfoot.GPT2Config(
    n_layer=2, n_head=3, n_embd=6, head_dim=2, qk_head_dim=4, n_inner=7, n_positions=13, vocab_size=11
)
TOKENS = np.array([[3, 1, 4, 1, 5]])
TARGETS = np.array([[1, 4, 1, 5, -100]])


@pytest.fixture(scope="module")
def own() -> Study:
    return Study(small_model(CONFIG, 0), TOKENS)


@pytest.fixture(scope="module")
def right(own: Study) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and every gradient, by autograd."""
    return gpt2_loss_and_grads(own.model.params, CONFIG, TOKENS, TARGETS)


def logits_of(study: Study) -> torch.Tensor:
    params = {name: torch.tensor(value) for name, value in study.model.params.items()}
    return gpt2_logits(params, CONFIG, torch.tensor(TOKENS))[0]


def test_the_header_of_the_page_describes_the_model(own: Study, right: Any) -> None:
    document = own.document
    assert document["loss"] == pytest.approx(right[0], rel=1e-12) and document["targets"] == 4
    n = sum(value.size for value in own.model.params.values())
    result = {**document["model"]}
    assert {name: result[name] for name in result if name not in ("autograd", "most_characters")} == {
        "family": "gpt2", "frozen": False, "key_heads": 3, "weights": 8 * n, "first_lr": 0.001,
        "parameters": n, "large": False, "blocks": 2, "heads": 3, "width": 6, "key_width": 4, "value_width": 2,
        "inner_width": 7, "vocabulary": 11, "positions": 13, "tied": True, "causal": True, "activation": "gelu_new",
        "has_tokenizer": False,
    }  # fmt: skip
    untied = Study(small_model(onfoot.GPT2Config(**{**vars(CONFIG), "tie_word_embeddings": False}), 0), TOKENS)
    assert untied.document["model"]["tied"] is False and untied.document["model"]["causal"] is True


def test_every_token_has_its_loss_its_probability_and_the_five_likeliest(own: Study) -> None:
    logits = logits_of(own)
    losses = F.cross_entropy(logits, torch.tensor(TARGETS[0]), reduction="none").tolist()
    probabilities = logits.softmax(-1)
    for t, token in enumerate(own.document["tokens"]):
        assert token["id"] == TOKENS[0, t]
        top = torch.topk(probabilities[t], 5)
        assert [one["id"] for one in token["best"]] == top.indices.tolist()
        assert [one["probability"] for one in token["best"]] == pytest.approx(top.values.tolist(), rel=1e-10)
        if t == 4:
            assert token["target"] is token["loss"] is token["probability"] is None
            continue
        assert token["target"] == TARGETS[0, t]
        assert token["loss"] == pytest.approx(losses[t], rel=1e-10)
        assert token["probability"] == pytest.approx(float(probabilities[t, TARGETS[0, t]]), rel=1e-10)


def test_the_first_arrays_are_those_that_the_page_opens_with(own: Study) -> None:
    arrays = own.first_arrays()
    assert next(iter(arrays)) == "ℓ"
    for id, text in arrays.items():
        numbers = np.frombuffer(base64.b64decode(text), "<f8")
        assert np.array_equal(numbers, own.tensors.value(id).ravel())  # bit for bit


def test_forks_have_norms_and_shares_of_both_ways(own: Study) -> None:
    for fork in own.training["forks"]:
        d = {i: value[0] for i, value in own.context.trace.blocks[fork["block"]].delta.items()}
        skip, whole = (d[10], d[5]) if fork["at"] == "Δ_5" else (d[5], d[1])
        through = whole - skip
        length = np.sqrt((whole**2).sum())
        assert fork["norm"] == pytest.approx(length, rel=1e-12)
        assert fork["skip_norm"] == pytest.approx(np.sqrt((skip**2).sum()), rel=1e-12)
        assert fork["branch_norm"] == pytest.approx(np.sqrt((through**2).sum()), rel=1e-12)
        assert fork["branch_share"] == pytest.approx((through * whole).sum() / length**2, rel=1e-10)


def test_the_tied_table_has_norms_and_the_angle_of_its_two_parts(own: Study) -> None:
    a11, d12 = own.context.trace.a[11][0], own.context.trace.delta[12][0]
    d1 = own.context.trace.blocks[0].delta[1][0]
    embedding = np.zeros((11, 6))
    np.add.at(embedding, TOKENS[0], d1)
    logits = d12.T @ a11
    tied = own.training["tied"]
    assert tied["norms"]["embedding"] == pytest.approx(np.sqrt((embedding**2).sum()), rel=1e-12)
    assert tied["norms"]["logits"] == pytest.approx(np.sqrt((logits**2).sum()), rel=1e-12)
    assert tied["norms"]["sum"] == pytest.approx(np.sqrt(((embedding + logits) ** 2).sum()), rel=1e-12)
    cosine = F.cosine_similarity(torch.tensor(embedding).flatten(), torch.tensor(logits).flatten(), dim=0)
    assert tied["cosine"] == pytest.approx(float(cosine), rel=1e-10)
    assert (tied["rows_embedding"], tied["rows_logits"]) == (3, 11)  # the last token has no target


def test_signals_have_their_norm_at_every_depth(own: Study) -> None:
    norms = own.tensors[own.training["signal_norms"]]
    trace = own.context.trace
    rows = {"Δ₁₂": trace.delta[12], "Δ₁₁": trace.delta[11], "Δ₁": trace.blocks[0].delta[1]}
    for b in range(2):
        for i, lowered in ((10, "₁₀"), (8, "₈"), (7, "₇"), (6, "₆"), (5, "₅"), (3, "₃"), (2, "₂")):
            rows[f"block {b + 1} Δ{lowered}"] = trace.blocks[b].delta[i]
    down = [f"block {b} Δ{i}" for b in (2, 1) for i in ("₁₀", "₈", "₇", "₆", "₅", "₃", "₂")]
    assert norms.row_labels == ["Δ₁₂", "Δ₁₁", *down, "Δ₁"]  # as the signal goes
    for label, values in zip(norms.row_labels, norms.value, strict=True):
        np.testing.assert_allclose(values, np.sqrt((rows[label][0] ** 2).sum(axis=-1)), rtol=1e-12)


def test_every_parameter_has_the_norm_of_its_gradient_beside_its_own(own: Study, right: Any) -> None:
    rows = own.training["parameter_norms"]
    assert [row["name"] for row in rows] == list(own.model.params)
    for row in rows:
        gradient, weight = right[1][row["name"]], own.model.params[row["name"]]
        assert row["gradient"] == pytest.approx(np.sqrt((gradient**2).sum()), rel=1e-9)
        assert row["weight"] == pytest.approx(np.sqrt((weight**2).sum()), rel=1e-12)
        assert row["ratio"] == pytest.approx(row["gradient"] / row["weight"], rel=1e-12)


def test_a_tokens_share_of_a_gradient_is_that_of_its_own_loss(own: Study, right: Any) -> None:
    shares = own.tensors.value(own.training["drivers"])
    names = list(own.model.params)
    for t in range(4):
        only = np.full((1, 5), -100)
        only[0, t] = TARGETS[0, t]
        _, grads = gpt2_loss_and_grads(own.model.params, CONFIG, TOKENS, only)  # the mean over one: 4 times its part
        for i, name in enumerate(names):
            whole = right[1][name]
            assert shares[i, t] == pytest.approx((grads[name] / 4 * whole).sum() / (whole**2).sum(), abs=1e-9), name


def test_eight_swaps_are_shown(own: Study) -> None:
    assert len(own.training["attribution"]["swaps"]) == 8


def test_steps_of_the_optimizer_are_torchs(own: Study) -> None:
    lr, n = 1.0, 20  # the largest allowed
    result = own.optimizer(lr, n)
    leaves = {k: torch.tensor(v.copy(), requires_grad=True) for k, v in own.model.params.items()}
    groups = [
        {"params": [leaf for leaf in leaves.values() if (leaf.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(3):
        theirs.zero_grad()
        loss = F.cross_entropy(gpt2_logits(leaves, CONFIG, torch.tensor(TOKENS))[0], torch.tensor(TARGETS[0]))
        loss.backward()
        losses.append(loss.item())
        theirs.step()
    assert result["losses"][:2] == pytest.approx(losses[:2], rel=1e-6)
    assert len(result["losses"]) == n + 1 and (result["lr"], result["steps"]) == (lr, n)
    assert result["actual"] == result["losses"][-1] - result["losses"][-2]
    assert (result["betas"], result["eps"], result["weight_decay"]) == ([0.9, 0.95], 1e-8, 0.1)


def test_one_step_has_the_right_arrays(own: Study, right: Any) -> None:
    result = own.optimizer(2e-3, 1)
    squares = sum((gradient**2).sum() for gradient in right[1].values())
    assert result["gradient_norm"] == pytest.approx(np.sqrt(squares), rel=1e-9)
    predicted = 0.0
    for row in result["parameters"]:
        w, gradient = own.model.params[row["name"]], right[1][row["name"]]
        arrays = {key: own.tensors.value(id) for key, id in row["arrays"].items()}
        np.testing.assert_array_equal(arrays["w"], w)
        np.testing.assert_allclose(arrays["∂w"], gradient, rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(arrays["m"], 0.1 * gradient, rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(arrays["v"], 0.05 * gradient**2, rtol=1e-7, atol=1e-18)
        np.testing.assert_allclose(arrays["update"], arrays["new"] - w, rtol=1e-9, atol=1e-16)
        predicted += float((gradient * (arrays["new"] - w)).sum())
    assert result["predicted"] == pytest.approx(predicted, rel=1e-8)
    assert result["losses"][0] == pytest.approx(right[0], rel=1e-12)
    with pytest.raises(ValueError, match="steps must be between 1 and 20, got 21"):
        own.optimizer(1e-3, 21)


def test_lora_has_the_right_counts_losses_and_matrices(own: Study, right: Any) -> None:
    result = own.lora
    shapes = {"attn.c_attn": (6, 2 * 12 + 6), "attn.c_proj": (6, 6), "mlp.c_fc": (6, 7), "mlp.c_proj": (7, 6)}
    n = 2 * sum(2 * (n_in + n_out) for n_in, n_out in shapes.values())
    assert (result["rank"], result["scale"], result["trainable"]) == (2, 1.0, n)
    assert result["frozen"] == sum(value.size for value in own.model.params.values())
    assert result["losses"][0] == pytest.approx(right[0], rel=1e-12) and len(result["losses"]) == 3 + 1
    assert result["losses"] == sorted(result["losses"], reverse=True)
    for layer in result["layers"]:
        name = layer["name"].partition(".h.")[2].partition(".")[2]
        n_in, n_out = shapes[name]
        assert len(layer["states"]) == 3
        for state in layer["states"]:
            arrays = {key: own.tensors.value(id) for key, id in state["arrays"].items()}
            assert arrays["d"].shape == arrays["∂d"].shape == (n_in, 2)
            assert arrays["u"].shape == arrays["∂u"].shape == (2, n_out)
            for key, norm in state["norms"].items():
                assert norm == pytest.approx(np.sqrt((arrays[key] ** 2).sum()), rel=1e-12)
        first, second = ({k: own.tensors.value(i) for k, i in s["arrays"].items()} for s in layer["states"][:2])
        np.testing.assert_array_equal(first["d"], second["d"])  # no gradient and no decay: d waits for u
        gradient = right[1][f"{layer['name']}.weight"]  # α = r: ∂u = dᵗ ∂w
        np.testing.assert_allclose(first["∂u"], first["d"].T @ gradient, rtol=1e-8, atol=1e-14)


def test_of_a_large_table_the_texts_rows_and_the_largest_are_shown() -> None:
    study = Study(
        small_model(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=4097), 0), TOKENS
    )
    gradient = study.context.trace.grads["transformer.wte.weight"]
    rows = study.tensors["∂w_tok"].rows
    assert rows is not None
    largest = np.argsort(-np.linalg.norm(gradient, axis=1))[:EXTRA_ROWS]
    best = np.argsort(-study.context.trace.a["pred"][0], axis=1)[:, :5]  # the top predictions of each token
    assert set(rows.tolist()) == set(largest.tolist()) | set(TOKENS[0].tolist()) | set(best.ravel().tolist())
    np.testing.assert_array_equal(study.tensors.value("∂w_tok"), gradient[rows])
    whole = Study(
        small_model(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=4096), 0), TOKENS
    )
    assert whole.tensors["∂w_tok"].rows is None


def test_notes_and_counts_of_embedding_and_logits(own: Study) -> None:
    assert own.tensors["∂w_pos"].note.startswith("rows 0 to 4 of 13;")
    assert own.tensors.value("n") == 4
    logits = logits_of(own)
    losses = F.cross_entropy(logits, torch.tensor(TARGETS[0]), reduction="none").numpy()
    np.testing.assert_allclose(own.tensors.value("ℓ"), losses, rtol=1e-10)
    np.testing.assert_array_equal(own.tensors.value("ohe"), np.eye(11)[TOKENS[0]])


def test_norms_have_their_sigma_and_means(own: Study) -> None:
    for b, name, i, x in ((0, "ln_1", 1, "a_1"), (1, "ln_2", 5, "1.a_5")):
        a = own.tensors.value(x)
        np.testing.assert_allclose(own.tensors.value(f"{b}.σ_{i}"), np.sqrt(a.var(axis=-1) + 1e-5), rtol=1e-12)
        weight = own.model.params[f"transformer.h.{b}.{name}.weight"]
        signal = own.context.trace.blocks[b].delta[2 if i == 1 else 6][0] * weight
        np.testing.assert_allclose(own.tensors.value(f"{b}.x_{i}"), signal, rtol=1e-12)
        np.testing.assert_allclose(own.tensors.value(f"{b}.mean x_{i}"), signal.mean(axis=-1), rtol=1e-9, atol=1e-16)


def test_terms_are_sent_to_the_page_with_sign_power_and_shift() -> None:
    term = product("x", Factor("a", "rc", -1), Factor("b", "rc", shift=3), sign=-1)
    assert term.to_json() == {
        "label": "x", "sign": -1,
        "factors": [{"tensor": "a", "at": "rc", "power": -1}, {"tensor": "b", "at": "rc", "shift": 3}],
    }  # fmt: skip
    assert dot("y", "tokens", ("a", "rj")).to_json() == {
        "label": "y", "factors": [{"tensor": "a", "at": "rj"}], "over": "tokens",
    }  # fmt: skip


def test_arrays_are_described_and_encoded_to_the_last_bit(own: Study) -> None:
    value = np.array([[1 / 3, np.pi, 1e-300]])
    assert np.array_equal(np.frombuffer(base64.b64decode(encoded(value)), "<f8"), value[0])
    result = describe(own.tensors["0.Δ_7"])
    assert result["shape"] == [5, 7] and result["axes"] == ["token", "feature"] and result["gradient"] is True
    assert "gradient" not in describe(own.tensors["0.a_7"])
    assert where_parts("a = b, c,  d = e") == ["a = b, c", "d = e"]


def test_an_array_is_added_once() -> None:
    tensors = Tensors()
    tensors.add(Tensor("a", "a", lambda: 1.0, ()))
    with pytest.raises(ValueError, match="array 'a' already exists"):
        tensors.add(Tensor("a", "a", lambda: 2.0, ()))


def test_a_wrong_gradient_is_red_where_it_is_wrong_by_a_millionth(own: Study) -> None:
    tensor = own.tensors["0.Δ_5"]

    class Off:
        def activation(self, noted: str) -> np.ndarray:
            return tensor.value * (1 + 1e-6)

    off: Any = Off()
    result = differentiated(tensor, off, 1.0)
    assert not result["passed"] and result["error"] == pytest.approx(1e-6, rel=1e-3)
    assert relative_error(np.array([3.0]), np.array([1.0]), 0.0) == 2.0
    assert relative_error(np.array([3e-9]), np.array([1e-9]), 1.0) == pytest.approx(2e-9)


def test_source_lines_are_those_of_the_files() -> None:
    package = Path(onfoot.__file__).parent
    for line in (*lines_of("Δ_5", ("NET.1",)), *lines_of("a_1", ()), *lines_of("∂b_1", ("42",))):
        text = (package.parent / line["file"]).read_text(encoding="utf-8").splitlines()[line["line"] - 1]
        assert text.strip() == line["code"] and line["code"]


def test_studies_of_other_tokens_have_other_keys() -> None:
    keys = {study_key(np.array([[a, b]])) for a in range(5) for b in range(5)}
    assert len(keys) == 25 and all(re.fullmatch("[0-9a-f]{16}", key) for key in keys)


def test_limits_are_exact(own: Study, model: Model) -> None:
    class Sized:
        config = CONFIG

        def __init__(self, n: int) -> None:
            self.n_params = n

    fits: Any = Sized(MAX_PARAMS)
    check_model(fits)
    over: Any = Sized(MAX_PARAMS + 1)
    with pytest.raises(ValueError, match="explore supports up to 500,000,000"):
        check_model(over)
    assert not own.is_large and own.model.n_params < LARGE
    assert texts.read_text(model, "a" * 64).shape == (1, 64)
    with pytest.raises(ValueError, match="65 tokens exceed the limit of 64"):
        texts.read_text(model, "a" * 65)
    with pytest.raises(ValueError, match="4,001 characters"):
        texts.read_text(model, "a" * 4001)
    with pytest.raises(ValueError, match="the token ids have 4,001 characters"):
        texts.read_ids(model, " " * 4001)
    with pytest.raises(ValueError, match="14 tokens exceed the limit of 13"):
        texts.read_ids(own.model, "1 " * 14)
    longer = onfoot.create(onfoot.GPT2Config(**{**vars(CONFIG), "n_positions": 99}))
    assert texts.read_ids(longer, "1 " * 64).shape == (1, 64)
    with pytest.raises(ValueError, match="65 tokens exceed the limit of 64"):
        texts.read_ids(longer, "1 " * 65)
    with pytest.raises(ValueError, match="token id must be between 0 and 10, got 11"):
        texts.read_ids(own.model, "1 11")


def test_characters_that_cannot_be_seen_are_shown() -> None:
    from onfoot.formats.tokenizer import char_tokenizer

    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=7)
    one = onfoot.create(config)
    one.tokenizer = char_tokenizer(["a \n\t\x00"])
    ids = {c: one.tokenizer.encode(c)[0] for c in "a \n\t\x00"}
    shown = {c: texts.shown(one, id) for c, id in ids.items()}
    assert shown == {"a": "a", " ": "␣", "\n": "↵", "\t": "⇥", "\x00": f"#{ids[chr(0)]}"}
    assert texts.vocabulary(one) == [texts.shown(one, id) for id in range(config.vocab_size)]


def test_the_vocabulary_shows_every_token_as_it_is_shown_alone() -> None:
    from onfoot.formats.tokenizer import bpe_tokenizer

    one = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=400))
    one.tokenizer = bpe_tokenizer(iter(["a  name, \u2028 ein Größe \n\n 日本 " * 9]), 330)
    listed = texts.vocabulary(one)
    assert listed == [texts.shown(one, id) for id in range(400)]
    assert "␣name" in listed and listed[399] == "#399" and any(not x.isascii() for x in listed)
    assert listed[one.tokenizer.eos_id] == "<|endoftext|>"
    one.tokenizer = None
    assert texts.vocabulary(one)[:3] == ["0", "1", "2"]


def test_an_exported_page_holds_every_array_and_refuses_to_grow_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=9, activation_function="relu")
    study = Study(small_model(config, 0), TOKENS)
    html = export(study, {"kind": "ids", "value": "3 1 4 1 5"})
    (text,) = re.findall(r'id="data">(.*?)</script>', html, flags=re.DOTALL)
    data = json.loads(text)
    assert set(data["tensors"]) == {tensor.id for tensor in study.tensors}
    for tensor in study.tensors:
        numbers = np.frombuffer(base64.b64decode(data["arrays"][data["tensors"][tensor.id]]), "<f8")
        assert np.array_equal(numbers, tensor.value.ravel(), equal_nan=True), tensor.id
    assert data["document"]["loss"] == study.loss
    again = Study(small_model(config, 0), TOKENS)
    size = plan_export(again).n_bytes
    monkeypatch.setattr(export_size, "MAX_PAGE_BYTES", size - 1)
    with pytest.raises(ValueError, match="even without large tables"):
        export(again, {})
    monkeypatch.setattr(export_size, "MAX_PAGE_BYTES", size)
    export(again, {})


def test_an_array_too_large_to_send_is_asked_for_by_line(own: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CELLS", 34)
    with pytest.raises(ValueError, match="35 cells exceed the limit of 34; request one row or column"):
        server_module._tensor(own, {"id": "0.a_7"})
    row = server_module._tensor(own, {"id": "0.a_7", "row": "4"})
    assert np.array_equal(np.frombuffer(row.body, "<f8"), own.tensors.value("0.a_7")[4])
    for query in ({"row": "-1"}, {"row": "5"}, {"column": "7"}):
        with pytest.raises(ValueError, match="must be between 0 and"):
            server_module._tensor(own, {"id": "0.a_7", **query})
    with pytest.raises(ValueError, match="lr must be between -1e9 and 1e9"):
        server_module._number({"lr": "1e10"}, "lr")


def test_answers_may_not_be_framed_kept_or_guessed_at() -> None:
    for name, value in {
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }.items():
        assert server_module.HEADERS[name] == value


def test_a_second_host_is_one_too_many() -> None:
    guard = server_module.Guard(None, 80)  # type: ignore[arg-type]
    good, evil = (b"host", b"127.0.0.1:80"), (b"host", b"evil.example")
    assert guard.refusal({"headers": [good]}) is None
    for headers in ([], [good, good], [good, evil], [evil]):
        refused = guard.refusal({"headers": headers})
        assert refused is not None and refused.status_code == 421


def test_no_text_of_the_script_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "script", lambda: 'x = "</script><b>";')
    html = page_module.single_page({})
    assert 'x = "<\\/script><b>";' in html and 'x = "</script' not in html


def test_four_texts_are_kept_and_the_oldest_goes() -> None:
    explorer = server_module.Explorer(small_model(CONFIG, 0), {})
    keys = [explorer.study({"ids": f"1 {i}"}).key for i in range(4)]
    explorer.study({"ids": "1 0"})
    fifth = explorer.study({"ids": "1 4"}).key
    assert list(explorer.studies) == [keys[2], keys[3], keys[0], fifth]


def test_a_mistakes_consequences_are_the_losses_after_a_step(model: Model, tokens: np.ndarray) -> None:
    study = Study(model, tokens)
    key = "attention: 1/√d_k missing from the backward pass"
    result = apply_mistake(study.context, key)
    grads = study.context.trace.grads
    own = Model(model.config, model.params, "float64", "numpy")
    onfoot.AdamW(own, lr=1e-3).step(grads)
    assert result["loss_right"] == pytest.approx(own.loss(tokens), rel=1e-12)
    assert result["loss_wrong"] != result["loss_right"] and abs(result["loss_wrong"] - result["loss_right"]) < 0.1
    assert 0 < result["cosine"] < 1
    rows = result["rows"]
    wrong = {row["name"] for row in rows if row["wrong"]}
    assert any("c_attn" in name for name in wrong) and "transformer.h.1.mlp.c_fc.weight" not in wrong
    top = [row["name"] for row in rows if row["block"] == 1]  # parameters come right behind the signal that they meet
    assert top.index("Δ_7") < top.index("transformer.h.1.mlp.c_fc.weight") < top.index("Δ_6")
    assert top.index("Δ_6") < top.index("transformer.h.1.ln_2.weight") < top.index("Δ_5")


def test_a_small_mistake_is_wrong_as_well(model: Model, tokens: np.ndarray) -> None:
    study = Study(model, tokens)
    result = apply_mistake(study.context, "layer_norm: unbiased variance")
    errors = [row["error"] for row in result["rows"] if row["wrong"] and row["error"] is not None]
    assert errors and min(errors) < 0.1


def test_the_tied_table_has_its_mistakes_only_where_it_is_tied(own: Study) -> None:
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=8, vocab_size=9)
    tied = {group["name"] for group in catalogue(Study(small_model(config, 0), TOKENS).context)["groups"]}
    other = onfoot.GPT2Config(**{**vars(config), "tie_word_embeddings": False})
    untied = {group["name"] for group in catalogue(Study(small_model(other, 0), TOKENS).context)["groups"]}
    assert tied - untied == {"Tied embedding"}
