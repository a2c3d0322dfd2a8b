"""Progress lines of a run, limits of its options, and the invariants that it measures."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import onfoot
from onfoot.models.model import Model
from onfoot.train import options, progress
from onfoot.train.invariants import _share, invariants
from onfoot.train.options import FinetuneOptions, TrainOptions
from onfoot.train.progress import Reporter, duration
from oracles import scrambled


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [duration(s) for s in (0, 5.9, 65, 3599, 3600, 7384, 90061)] == [
        "0:00", "0:05", "1:05", "59:59", "1:00:00", "2:03:04", "25:01:01",
    ]  # fmt: skip


def test_plain_lines_come_every_ten_seconds_and_at_the_end_with_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with Reporter(60, 10, Console(file=out, width=200)) as report:
        for step in range(11, 61):
            clock[0] += 2.0
            report.update(step, {"loss": f"{step}"})
    lines = out.getvalue().splitlines()
    said = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert said[1:] == [*range(said[0] + 5, 60, 5), 60] and said[0] in (11, 15)  # every 10 seconds
    for step, line in zip(said, lines, strict=True):
        assert line.startswith(f"step {step}/60  loss {step}  left ")
        assert line.endswith(f"left {duration(2 * (60 - step))}")  # 2 seconds each since step 10


def test_limits_themselves_are_allowed() -> None:
    TrainOptions(dropout=0.0, vocab_size=257, n_layer=1, context=1)
    for wrong, message in (
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"vocab_size": 256}, "vocab_size must be >= 257, got 256"),
        ({"bucket_mb": 0.0}, "bucket_mb must be > 0, got 0.0"),
        ({"validation": 1.0}, "validation must be in .*, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainOptions(**wrong)
    with pytest.raises(ValueError, match="--full trains all weights, --quantized freezes them"):
        FinetuneOptions(data=["x.jsonl"], full=True, quantized=True)


def test_the_types_of_the_options_are_looked_up_once_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    TrainOptions()
    monkeypatch.setattr(options, "get_type_hints", lambda cls: pytest.fail(f"{cls.__name__}, again"))
    TrainOptions(steps=7)


def test_two_numbers_may_be_a_list_as_files_have_them() -> None:
    TrainOptions.check_type("betas", [0.9, 0.95])
    TrainOptions.check_type("betas", (0.9, 0.95))
    for wrong in ([0.9], 0.9, "ab"):
        with pytest.raises(ValueError, match=r"^betas must be two numbers, got "):
            TrainOptions.check_type("betas", wrong)


def test_options_load_only_for_their_own_command(tmp_path: Path) -> None:
    given = TrainOptions(texts=["a.txt"], lr=0.25, betas=(0.5, 0.75))
    (tmp_path / "run.json").write_text(json.dumps({"command": "train", **asdict(given)}))
    assert TrainOptions.load(tmp_path / "run.json") == given
    with pytest.raises(ValueError, match="is a run of onfoot train"):
        FinetuneOptions.load(tmp_path / "run.json")


def test_invariants_are_the_largest_relative_sum_that_should_be_zero() -> None:
    assert _share(np.array([0.5, -3.0]), np.array([4.0, 6.0])) == 0.5
    config = onfoot.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model = Model(config, scrambled(onfoot.create(config).params, 0), "float64", "numpy")
    tokens = np.random.default_rng(0).integers(0, 17, (2, 7))
    targets = np.roll(tokens, -1, axis=1)
    right = invariants(model, tokens, targets)
    assert set(right) == {"rows_of_delta_causal", "gradient_of_b_k", "features_of_layer_norm"}
    assert max(right.values()) < 1e-12


def test_a_wrong_second_norm_is_detected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from onfoot.models.run import Run

    config = onfoot.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = Model(config, scrambled(onfoot.create(config).params, 0), "float64", "numpy")
    tokens = np.random.default_rng(0).integers(0, 17, (2, 7))
    backward = Run.layer_norm_backward

    def wrong(self: Any, layer: str, *arguments: Any, **named: Any) -> Any:
        dx = backward(self, layer, *arguments, **named)
        return dx + 0.1 if layer.endswith("ln_2") else dx

    monkeypatch.setattr(Run, "layer_norm_backward", wrong)
    assert invariants(model, tokens, np.roll(tokens, -1, axis=1))["features_of_layer_norm"] > 1e-3
