"""The learning-rate range test: its suggestion trains better than rates far from it, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.arrays import to_numpy
from onfoot.cli import app
from onfoot.data import corpus
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.models.model import Model
from onfoot.train.lr_range import FEWEST, NEIGHBOURS, LrRange
from onfoot.train.options import TrainingOptions
from oracles import scrambled

CONFIG = onfoot.GPT2Config(vocab_size=257, n_positions=32, n_embd=48, n_layer=2, n_head=3)
TEXT = "".join(corpus.all_pieces([corpus.builtin_text()]))[:200_000]
IDS = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64)


def gpt2(seed: int = 0, dtype: str = "float32", engine: str = "auto") -> Model:
    model = onfoot.create(CONFIG, seed, dtype, engine)
    model.tokenizer = byte_tokenizer()
    return model


def options(**changes: Any) -> TrainingOptions:
    known = {"steps": 150, "batch_size": 8, "eval_every": 200, "sample_tokens": 0, "quiet": True}
    return TrainingOptions(**{**known, **changes})


def final_loss(model: Model, lr: float) -> float:
    loss = onfoot.Trainer(model, IDS, options(lr=lr)).run().validation_loss
    assert loss is not None
    return loss


def test_the_suggestion_trains_better_than_thirty_times_more_or_less() -> None:
    found = onfoot.find_lr(gpt2(), IDS, options())
    assert not found.doubt
    best, high, low = (final_loss(gpt2(), found.suggestion * factor) for factor in (1, 30, 1 / 30))
    assert best < high - 0.1
    assert best < low - 0.5


@pytest.mark.slow
def test_the_same_for_lora_layers_on_a_trained_model() -> None:
    base = gpt2()
    other = np.frombuffer(TEXT.upper().encode(), np.uint8).astype(np.int64)
    onfoot.Trainer(base, IDS, options(lr=3e-3)).run()

    def loss(lr: float) -> float:
        outcome = onfoot.Trainer(adapted(base), other, options(lr=lr)).run()
        assert outcome.validation_loss is not None
        return outcome.validation_loss

    found = onfoot.find_lr(adapted(base), other, options())
    best, high, low = (loss(found.suggestion * factor) for factor in (1, 30, 1 / 30))
    assert best < high
    assert best < low


def adapted(base: Model) -> Model:
    model = Model(CONFIG, base.params)
    model.add_lora(8, seed=3)
    return model


@pytest.mark.parametrize(("dtype", "engine"), [("float32", "auto"), ("float64", "numpy"), ("float64", "torch")])
def test_weights_are_bitwise_unchanged_in_the_same_arrays(dtype: str, engine: str) -> None:
    model = Model(CONFIG, scrambled(gpt2().params, 1, 0.1), dtype, engine)
    arrays = dict(model.params)
    before = {name: to_numpy(p).copy() for name, p in arrays.items()}
    onfoot.find_lr(model, IDS, options(recompute="block"), steps=20, low=1e-3, high=10.0)
    assert model.recompute is False
    for name, p in model.params.items():
        assert p is arrays[name]
        assert np.array_equal(to_numpy(p), before[name])


def test_rates_rise_exponentially_and_losses_are_those_of_training() -> None:
    found = onfoot.find_lr(gpt2(), IDS, options(), steps=20, low=1e-5, high=1e-3)
    assert found.rates == pytest.approx(np.geomspace(1e-5, 1e-3, 20), rel=1e-12)
    trainer = onfoot.Trainer(gpt2(), IDS, options())
    trainer.learning_rate = lambda step: float(found.rates[step])
    steps = iter(trainer)
    assert found.losses.tolist() == [next(steps).loss for _ in range(20)]


def test_the_test_ends_where_the_loss_diverges() -> None:
    found = onfoot.find_lr(gpt2(), IDS, options(clip=0.0), low=1e-3, high=1e6)
    assert "the test ended" in found.ended and len(found.rates) < 120
    assert np.isfinite(found.losses).all() and found.rates[-1] < 1e6


def test_a_failing_source_leaves_the_weights_as_they_were() -> None:
    class Failing(onfoot.Source):
        def microbatches(self, step: int, share: Any = None) -> Any:
            if step == 5:
                raise RuntimeError("no more")
            return [(IDS[None, :16], IDS[None, 1:17])]

    model = gpt2()
    before = {name: to_numpy(p).copy() for name, p in model.params.items()}
    with pytest.raises(ValueError, match=r"Failing\.microbatches failed after step 5: RuntimeError: no more"):
        onfoot.find_lr(model, Failing(), options())
    assert all(np.array_equal(to_numpy(p), before[name]) for name, p in model.params.items())


def test_smoothing_is_a_mean_of_neighbours_and_doubts_are_said() -> None:
    rates, k = np.geomspace(1e-6, 1, 40), NEIGHBOURS
    valley = LrRange(rates, (np.arange(40) - 25.0) ** 2)
    assert valley.smoothed[20] == pytest.approx(valley.losses[20 - k : 20 + k + 1].mean())
    assert valley.smoothed[0] == pytest.approx(valley.losses[: k + 1].mean())
    assert valley.lowest == rates[25]
    level = valley.smoothed[0] - 0.8 * (valley.smoothed[0] - valley.smoothed[25])
    first = next(rate for rate, loss in zip(rates, valley.smoothed, strict=True) if loss <= level)
    assert valley.suggestion == float(f"{first:.1e}")
    assert f"suggestion: --lr {valley.suggestion:g}, the first rate at which the loss has made 80%" in valley.report()
    rising = LrRange(rates, np.arange(40.0))
    assert "no rate of the test lowers the loss" in rising.doubt and "no suggestion" in rising.report()
    falling = LrRange(rates, -np.arange(40.0))
    assert "test higher rates" in falling.doubt
    assert not LrRange(rates, -np.arange(40.0), "ended").doubt


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": FEWEST - 1}, f"at least {FEWEST} steps"),
        ({"low": 0.0}, "0 < low < high"),
        ({"low": 1e-2, "high": 1e-2}, "0 < low < high"),
        ({"high": float("inf")}, "0 < low < high"),
        ({"low": float("nan")}, "0 < low < high"),
        ({"low": 1e8, "high": 1e12, "options": options(clip=0.0)}, "test lower rates"),
        ({"options": options(dp_clip=1.0, dp_noise=0.0)}, "not private"),
    ],
)
def test_bad_input_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onfoot.find_lr(gpt2(), IDS, **{"options": options(), **values})


def test_the_commands_print_a_table_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT[:5000])
    sizes = ["--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "16", "--batch-size", "4"]
    model = gpt2()
    model.save(tmp_path / "model")
    lines = [f'{{"prompt": "say {i}: ", "completion": "{i % 7}"}}' for i in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for command in (
        ["train", "text.txt", *sizes],
        ["finetune", "model", "--data", "data.jsonl", "--max-length", "32"],
    ):
        done = CliRunner().invoke(app, [*command, "--find-lr"])
        assert done.exit_code == 0, done.output
        assert "learning rate      loss" in done.output and "the first rate at which" in done.output
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files


@pytest.mark.parametrize("more", [["--lr", "1e-3"], ["--out", "there"], ["--resume", "there"]])
def test_options_that_do_not_go_with_a_range_test_are_refused(more: list[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    done = CliRunner().invoke(app, ["train", str(text), "--find-lr", *more])
    assert done.exit_code != 0
    assert more[0] in str(done.exception) + done.output
