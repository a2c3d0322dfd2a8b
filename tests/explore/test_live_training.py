"""Training live: the steps are those of the library's AdamW, and any of them can be had again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.cli.explore import _load
from onfoot.explore import live
from onfoot.explore.autograd import Autograd
from onfoot.explore.copies import copy_of
from onfoot.explore.live import Training, rate_at, read_rates
from onfoot.explore.live_checkpoints import run_checkpoints
from onfoot.explore.study import Study
from onfoot.explore.trained import RUN, live_answer, trained_study
from onfoot.explore.walk import small_model
from onfoot.models.model import Model
from onfoot.train.checkpoint import save_checkpoint
from onfoot.train.optimizer import AdamW

TOKENS = np.array([[3, 1, 4, 1, 5]])
SMALL = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=9, vocab_size=11)
RATES = "0:0.003,7:0.02,15:0.001"


@pytest.fixture
def small() -> Study:
    return Study(small_model(SMALL, 0), TOKENS)


def trained_by_hand(study: Study, steps: int) -> tuple[Model, list[float]]:
    """The library's own training step, with the rates of RATES."""
    model = copy_of(study.model)
    optimizer = AdamW(model)
    losses = []
    for step in range(steps):
        optimizer.lr = 0.003 if step < 7 else 0.02 if step < 15 else 0.001
        losses.append(model.train_step(optimizer, study.tokens, study.targets))
    return model, [*losses, model.loss(study.tokens, study.targets)]


def test_every_step_is_the_librarys_train_step(small: Study) -> None:
    model, losses = trained_by_hand(small, 23)
    found = small.live.answer(RATES, 23, 0)
    assert found["losses"] == pytest.approx(losses, rel=1e-13)
    for name, value in small.live.model_at(RATES, 23).params.items():
        assert np.allclose(value, model.params[name], rtol=1e-12, atol=1e-15), name
    assert losses[-1] < losses[0] - 0.05


def test_the_first_steps_are_those_of_pytorchs_adamw_with_autograd(small: Study) -> None:
    model = copy_of(small.model)
    params = {name: torch.tensor(np.array(value)) for name, value in model.params.items()}
    groups = [
        {"params": [x for x in params.values() if (x.ndim > 1) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(4):
        autograd = Autograd(model, small.tokens, small.targets, small.divisor)
        for name, value in params.items():
            value.grad = torch.tensor(autograd.parameter(name).copy())
            if name.endswith("c_attn.bias"):
                value.grad[8:16] = 0  # b_k has no effect: exactly 0 here, rounding noise there
        optimizer.step()
        for name, value in params.items():
            model.params[name][...] = value.numpy()
    found = small.live.model_at("0:0.01", 4)
    for name, value in params.items():
        assert np.allclose(found.params[name], value.numpy(), rtol=1e-8, atol=1e-10), name


def test_a_step_looked_at_again_is_the_same_to_the_last_bit(small: Study) -> None:
    training = small.live
    order = (40, 3, 39, 0, 12, 40)
    training.go_to(45)
    assert training.snapshots.keys() == {10, 20, 30, 40}
    for step in order:
        again = training.go_to(step)
        fresh = Training(small.context)
        straight = fresh.go_to(step)
        assert all((again.params[name] == straight.params[name]).all() for name in again.params), step
        assert again.loss(small.tokens, small.targets) == training.losses[step] == fresh.losses[step]


def test_another_rate_changes_only_the_steps_after_it(small: Study) -> None:
    before = list(small.live.answer("0:0.003", 40, 0)["losses"])
    changed = small.live.answer("0:0.003,25:0.05", 40, 0)["losses"]
    assert changed[:26] == before[:26] and changed[26] != before[26]
    assert small.live.answer("0:0.003", 40, 0)["losses"] == before
    same = small.live.answer("0:0.003,60:0.5", 40, 38)
    assert same["losses"] == before[38:]


def test_memory_is_bounded_and_what_is_said_about_it_is_true(small: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    one = 3 * 8 * small.model.n_params
    monkeypatch.setattr(live, "SNAPSHOT_BYTES", 25 * one)
    training = Training(small.context)
    assert training.every == 40
    for step in range(100, 1001, 100):
        training.answer("0:0.001", step, step)
    held = sum(x.nbytes for s in training.snapshots.values() for part in s for x in part.values())
    assert held == training.most_bytes == 25 * one


def test_the_difference_from_step_0(small: Study) -> None:
    found = small.live.answer(RATES, 20, 20)
    model, _ = trained_by_hand(small, 20)
    for row in found["parameters"]:
        before = small.model.params[row["name"]]
        change = float(np.sqrt(((model.params[row["name"]] - before) ** 2).sum()))
        assert row["change"] == pytest.approx(change, rel=1e-10, abs=1e-14), row["name"]
        norm = float(np.sqrt((before**2).sum()))
        assert row["weight"] == pytest.approx(norm, rel=1e-12) and row["ratio"] == pytest.approx(
            change / norm, rel=1e-9
        )
    logits = torch.tensor(np.asarray(model.logits(small.tokens))[0])
    expected = torch.softmax(logits, -1).numpy()
    for t, token in enumerate(found["tokens"]):
        assert [one["id"] for one in token["best"]] == list(np.argsort(-expected[t])[:3])
        assert token["best"][0]["probability"] == pytest.approx(expected[t].max(), rel=1e-10)
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(TOKENS[0, 1:]), reduction="none")
    assert [token["loss"] for token in found["tokens"]] == pytest.approx([*losses.tolist(), 0], rel=1e-10)


def test_a_rate_that_is_too_large_ends_the_training_before_the_loss_is_not_finite(
    small: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, real = small.live, Model.loss_and_grads

    def loss_and_grads(model: Model, *args: Any, **options: Any) -> Any:
        loss, grads = real(model, *args, **options)
        return float("nan") if training._at == 8 else loss, grads

    monkeypatch.setattr(Model, "loss_and_grads", loss_and_grads)
    found = training.answer("0:1.0", 20, 0)
    assert (found["ended"], found["step"], len(found["losses"])) == (7, 7, 8)
    monkeypatch.undo()
    assert training.answer("0:1.0,5:0.001", 20, 0)["step"] == 20  # a smaller rate goes on


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ("", "rates must be like"), ("0:x", "rates must be like"), ("1:0.1", "begin at step 0"),
        ("0:0.1,5:0.2,5:0.3", "increase"), ("0:0.1,1000:0.2", "up to step 999"), ("0:0", "lr must be > 0"),
        ("0:nan", "lr must be > 0"), ("0:2", "<= 1.0, got 2.0"),
        (",".join(f"{i}:0.1" for i in range(65)), "at most 64 learning rates"),
    ],
)  # fmt: skip
def test_rates_that_make_no_sense_are_refused(rates: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rates(rates)


def test_rates_are_read_as_they_are_written() -> None:
    rates = read_rates("0:0.1,50:1e-3")
    assert live.rates_text(rates) == "0:0.1,50:0.001" and read_rates(live.rates_text(rates)) == rates
    assert [rate_at(rates, step) for step in (0, 49, 50, 999)] == [0.1, 0.1, 0.001, 0.001]


def test_a_request_has_a_bounded_number_of_new_steps(small: Study) -> None:
    found = small.live.answer("0:0.001", 250, 0)
    assert found["step"] == 100 and len(found["losses"]) == 101
    with pytest.raises(ValueError, match="step must be between 0 and 1000, got 1001"):
        small.live.answer("0:0.001", 1001, 0)
    with pytest.raises(ValueError, match="step 201 is not computed yet"):
        trained_study(small, "0:0.001", 201)
    with pytest.raises(ValueError, match="step must be an integer"):
        live_answer(small, {"rates": "0:0.1", "step": "x", "known": "0"})


def test_the_study_at_a_step_is_the_study_of_the_trained_model(small: Study) -> None:
    trained = trained_study(small, RATES, 20)
    model, losses = trained_by_hand(small, 20)
    assert trained.loss == pytest.approx(losses[-1], rel=1e-12)
    assert trained.document["trained"] == {"base": small.key, "rates": RATES, "step": 20, "label": 20}
    _, grads = model.loss_and_grads(small.tokens, small.targets)
    assert np.allclose(trained.tensors.value("0.∂w_3"), grads["transformer.h.0.attn.c_proj.weight"], atol=1e-12)
    assert trained.key != small.key and "trained" not in small.document


def test_the_checkpoints_of_a_run_are_steps_as_well(tmp_path: Path) -> None:
    model, losses = small_model(SMALL, 0), []
    optimizer = AdamW(model, lr=0.01)
    for step in (0, 5, 10):
        while optimizer.steps < step:
            model.train_step(optimizer, TOKENS)
        losses.append(model.loss(TOKENS))
        state = {"step": step, "best_step": 0, "optimizer_steps": step, "best_loss": 0.0, "seconds": 0.0}
        save_checkpoint(tmp_path, model.save, optimizer, state, keep=9)
    study = Study(model, TOKENS)
    assert study.run_steps == [] and run_checkpoints(model) == []
    assert [folder.name for folder in run_checkpoints(_load(tmp_path))] == [f"step-{step:07d}" for step in (0, 5, 10)]
    model.source = str(tmp_path)
    study = Study(model, TOKENS)
    assert live_answer(study, {"rates": "0:0.001", "step": "1", "known": "0"})["run"] == [0, 5, 10]
    found = live_answer(study, {"rates": RUN, "step": "2", "known": "0"})
    assert found["checkpoints"] == [0, 5, 10] and found["most_steps"] == 2
    assert found["losses"] == pytest.approx(losses, rel=1e-6)  # the files are float32
    assert found["parameters"][0]["change"] > 0
    trained = trained_study(study, RUN, 1)
    assert trained.loss == pytest.approx(losses[1], rel=1e-6) and trained.document["trained"]["label"] == 5
