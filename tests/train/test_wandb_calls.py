"""What a run tells Weights & Biases, by a stand-in for its package; test_wandb.py has the real one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import onfoot

IDS = np.random.default_rng(0).integers(0, 50, 600)


class Wandb(ModuleType):
    """The part of the package that is used: init, the run that it returns, and the class of its errors."""

    id = "fox"

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.fails = ""

    def init(self, **settings: Any) -> Wandb:
        if self.fails:
            raise self.Error(self.fails)
        self.started.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        assert len(self.started) == self.finished + 1
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def trainer(out: Path | None, callbacks: Any = ()) -> onfoot.Trainer:
    config = onfoot.GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    options = onfoot.TrainingOptions(
        steps=4, batch_size=2, lr=1e-2, warmup=1, eval_every=2, log="wandb", sample_tokens=0, quiet=True
    )
    return onfoot.Trainer(onfoot.create(config, 0, "float64", "numpy"), IDS, options, callbacks, out=out)


def test_every_step_and_evaluation_is_logged_under_the_runs_name_and_finished_once(
    wandb: Wandb, tmp_path: Path
) -> None:
    run = tmp_path / "fox-run"
    trainer(run).run()
    (started,) = wandb.started
    assert (started["project"], started["name"], started["dir"]) == ("onfoot", "fox-run", str(run))
    assert (started["config"]["steps"], started["config"]["lr"]) == (4, 1e-2)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [(n, values) for n, values in wandb.logged if "train/loss" in values]
    assert [n for n, _ in steps] == [1, 2, 3, 4]
    for (_, values), record in zip(steps, [r for r in log if "loss" in r], strict=True):
        assert {name: values[f"train/{name}"] for name in ("loss", "lr", "grad_norm")} == {
            name: record[name] for name in ("loss", "lr", "grad_norm")
        }
        assert values["train/tokens_per_s"] > 0
    evaluations = [(n, values["validation/loss"]) for n, values in wandb.logged if "validation/loss" in values]
    assert evaluations == [(r["step"], r["val_loss"]) for r in log if "val_loss" in r] and len(evaluations) == 2
    assert [n for n, _ in wandb.logged] == sorted(n for n, _ in wandb.logged)  # which W&B demands
    assert wandb.finished == 1


def test_an_evaluation_before_the_run_is_logged_in_the_same_run(wandb: Wandb) -> None:
    one = trainer(None)
    one.evaluate()
    one.run()
    assert len(wandb.started) == 1 and wandb.logged[0][0] == 0 and "validation/loss" in wandb.logged[0][1]


def test_a_run_that_was_left_goes_on_as_the_same_run(wandb: Wandb) -> None:
    one = trainer(None)
    for step in one:
        if step.step == 2:
            break
    one.run()
    first, second = wandb.started
    assert "id" not in first and (second["id"], second["resume"]) == ("fox", "allow")
    assert [n for n, values in wandb.logged if "train/loss" in values] == [1, 2, 3, 4] and wandb.finished == 2


def test_a_run_that_fails_is_finished_too(wandb: Wandb) -> None:
    class Broken(onfoot.Callback):
        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            raise RuntimeError("no")

    with pytest.raises(ValueError, match=r"Broken.on_step failed"):
        trainer(None, [Broken()]).run()
    assert wandb.started[0]["name"] is None and wandb.finished == 1


def test_if_it_cannot_start_the_error_is_one_line_with_the_way_out(wandb: Wandb, tmp_path: Path) -> None:
    wandb.fails = "No API key\nconfigured."
    with pytest.raises(
        ValueError, match=r"^Weights & Biases cannot start: No API key configured\.?; .*WANDB_MODE=offline$"
    ):
        trainer(tmp_path / "run").run()
    assert wandb.logged == [] and wandb.finished == 0
    wandb.fails = ""
    trainer(tmp_path / "run").run()  # no step was made, so the folder has no run
    assert wandb.finished == 1


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'pip install "onfoot\[wandb\]"'):
        trainer(None)
