"""Runs that go on: more steps, other learning rates and batch sizes, early stopping, options from files."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from onfoot.blame.run import open_run
from onfoot.cli import app
from onfoot.cli.config_file import read_config
from onfoot.data.batches import Place, place
from onfoot.train import finetune, pretrain, runs
from onfoot.train.options import FinetuneOptions, TrainOptions

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "context": 16, "batch_size": 2, "sample_tokens": 0, "quiet": True}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    return path


def options(text: Path, **changes: Any) -> TrainOptions:
    known = {"texts": [str(text)], "steps": 10, "lr": 1e-2, "warmup": 4, "eval_every": 5, "dtype": "float64", **SIZES}
    return TrainOptions(**{**known, **changes})


def records(run: Path, name: str) -> list[Any]:
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [record[name] for record in log if name in record]


def test_a_finished_run_extended_follows_the_documented_schedule_exactly(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text)).run()
    trainer, _ = pretrain.resume(run, steps=20)
    assert trainer.run().state.step == 20

    def cosine(done: float) -> float:
        return 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    first = [1e-2 * (k + 1) / 4 for k in range(4)] + [cosine(k / 6) for k in range(6)]
    last = first[-1]
    second = [last + (1e-2 - last) * (k + 1) / 4 for k in range(4)] + [cosine(k / 6) for k in range(6)]
    assert records(run, "lr") == pytest.approx([*first, *second], rel=1e-14)
    assert json.loads((run / "run.json").read_text())["changes"] == [{"step": 10, "before": {"steps": 10}}]


def test_every_rate_of_500_steps_and_500_more_is_that_of_the_guide() -> None:
    settings = TrainOptions(steps=500)
    p, w, floor = 3e-3, 50, 3e-4  # the default rate; a tenth of 500 steps; a tenth of the rate

    def decay(k: int, steps: int) -> float:  # half a cosine from the peak to the floor
        return floor + (p - floor) * (1 + math.cos(math.pi * (k - w) / (steps - w))) / 2

    def part(r: float, steps: int) -> list[float]:  # the guide's formula for a last rate r
        return [r + (p - r) * (k + 1) / w for k in range(w)] + [decay(k, steps) for k in range(w, steps)]

    first = part(0.0, 500)
    assert [settings.learning_rate(s) for s in range(500)] == pytest.approx(first, rel=1e-13)
    extended = settings.changed(500, steps=1000)
    rates = [extended.learning_rate(s) for s in range(1000)]
    assert rates == pytest.approx([*first, *part(first[-1], 500)], rel=1e-13)
    assert max(rates) == p and rates[999] == pytest.approx(floor, rel=1e-3) and rates[500] < 2 * floor


def test_changing_nothing_changes_nothing(tmp_path: Path, text: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pretrain.start(whole, options(text)).run()
    trainer = pretrain.start(cut, options(text, save_every=6))
    for step in trainer:
        if step.step == 6:
            break
    rest, _ = pretrain.resume(cut, steps=10, lr=1e-2, eval_every=5)  # the same values as before
    rest.run()
    assert rest.options.changes == []
    assert records(cut, "loss") == records(whole, "loss") and records(cut, "lr") == records(whole, "lr")
    first, second = ((run / "last" / "model.safetensors").read_bytes() for run in (whole, cut))
    assert first == second


def test_an_interrupted_run_with_other_rates_goes_on_from_its_own_rate(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    for step in pretrain.start(run, options(text)):
        if step.step == 7:
            break
    trainer, _ = pretrain.resume(run, lr=4e-2, schedule="linear", warmup=2, lr_floor=0.5)
    trainer.run()
    rates = records(run, "lr")
    assert len(rates) == 10
    assert rates[7:] == pytest.approx([rates[6] + (4e-2 - rates[6]) / 2, 4e-2, 4e-2], rel=1e-14)
    again, _ = pretrain.resume(run, steps=14)  # a second change; the first is remembered
    again.run()
    assert records(run, "lr")[:10] == rates
    assert records(run, "lr")[10:] == pytest.approx([4e-2, 4e-2, 4e-2, 3e-2], rel=1e-14)
    assert [c["step"] for c in again.options.changes] == [7, 10]


def test_another_batch_size_continues_behind_the_windows_that_were_seen(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text)).run()
    trainer, _ = pretrain.resume(run, steps=20, batch_size=3, accumulate=2)
    seen = trainer.source.train.indices(0, 2 * 10 + 6 * 10)
    for step in (10, 11, 19):
        expected = seen[20 + (step - 10) * 6 : 20 + (step - 9) * 6]
        found = [int(x) for one in trainer.source.example_numbers(step) for x in one.max(axis=1)]
        assert found == expected
        tokens = np.concatenate([b.tokens for b in trainer.source.microbatches(step)])
        assert (tokens == trainer.source.train.batch(expected)[0]).all()


def test_blame_explains_runs_with_more_steps_and_refuses_other_batch_sizes(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text, keep_trajectory=1)).run()
    pretrain.resume(run, steps=14)[0].run()
    opened = open_run(run, "last")
    assert opened.last == 14
    assert [opened.trainer.options.learning_rate(s) for s in range(14)] == records(run, "lr")
    pretrain.resume(run, steps=16, batch_size=3)[0].run()
    with pytest.raises(ValueError, match="batch size or clipping was changed at step 14"):
        open_run(run, "last")


def test_places_after_several_changes() -> None:
    assert place([(0, 4)]) == Place(0, 0)
    found = place([(0, 4), (10, 4), (12, 6), (20, 1)])
    assert found == Place(20, 12 * 4 + 8 * 6) and found.of(23, 1) == 99


def test_examples_of_a_fine_tune_continue_too(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "base", options(text)).run()
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1=", "completion": f"{a + 1}"}) + "\n" for a in range(30)))
    settings = {"steps": 4, "batch_size": 2, "max_length": 16, "sample_tokens": 0, "quiet": True, "dtype": "float64"}
    known = FinetuneOptions(model=str(tmp_path / "base"), data=[str(data)], pack=False, **settings)
    finetune.start(tmp_path / "run", known).run()
    trainer, _ = finetune.resume(tmp_path / "run", steps=8, batch_size=3)
    rows = trainer.source.train
    assert (trainer.source.microbatches(5)[0].tokens == rows.sample(8 + 3, 3).tokens).all()
    assert trainer.run().state.step == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 3}, "--steps 3 is less than the 10 steps that are done"),
        ({"n_embd": 32}, "--n-embd cannot change when a run is resumed; what can: --steps, "),
        ({"lr": -1.0, "steps": 12}, "lr must be >= 0"),
    ],
)
def test_what_cannot_change_is_refused_and_nothing_is_lost(
    tmp_path: Path, text: Path, changes: dict[str, Any], said: str
) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text)).run()
    before = (run / "run.json").read_bytes()
    with pytest.raises(ValueError, match=said):
        pretrain.resume(run, **changes)
    assert (run / "run.json").read_bytes() == before
    assert pretrain.resume(run)[0].state.step == 10


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--lr", 1e-9, "--schedule", "constant"),
            "--lr and --schedule have no effect: all 10 steps of the run are done",
        ),
        (("--watch",), "--watch has no effect: all 10 steps of the run are done; add --steps N to go on"),
        (("--no-watch", "--keep", 3), "--no-watch and --keep have no effect: all 10 steps"),
        (("--steps", 10, "--lr", 1e-9), "--lr has no effect: all 10 steps"),
    ],
    ids=str,
)
def test_a_finished_run_takes_no_options_that_would_act_later(
    tmp_path: Path, text: Path, given: tuple[Any, ...], said: str
) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text, watch="--no-watch" in given)).run()
    before = (run / "run.json").read_bytes()
    code, output = onfoot("train", "--resume", run, *given)
    assert code == 2 and said in " ".join(output.split())
    assert (run / "run.json").read_bytes() == before
    trainer, _ = pretrain.resume(run, steps=12)
    assert trainer.options.lr == 1e-2 and trainer.options.schedule == "cosine"
    assert trainer.options.watch == ("--no-watch" in given)


def test_a_finished_fine_tune_takes_no_options_either(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "base", options(text)).run()
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    settings = {"steps": 2, "sample_tokens": 0, "quiet": True}
    known = FinetuneOptions(model=str(tmp_path / "base"), data=[str(tmp_path / "d.jsonl")], **settings)
    finetune.start(tmp_path / "run", known).run()
    code, output = onfoot("finetune", "--resume", tmp_path / "run", "--lr", 1e-9)
    assert code == 2 and "--lr has no effect: all 2 steps of the run are done" in " ".join(output.split())


def test_a_finished_run_is_complete_also_with_its_own_values_and_quiet(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text, quiet=False)).run()
    before = (run / "run.json").read_bytes()
    code, output = onfoot("train", "--resume", run, "--steps", 10, "--lr", 1e-2, "--quiet")
    assert code == 0 and "is complete: all 10 steps are done" in " ".join(output.split())
    assert (run / "run.json").read_bytes() == before  # nothing acts later


def test_a_run_that_is_shortened_to_what_is_done_is_recorded(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    for step in pretrain.start(run, options(text)):
        if step.step == 6:
            break
    with pytest.raises(ValueError, match="--lr has no effect: all 6 steps of the run are done"):
        pretrain.resume(run, steps=6, lr=1e-9)
    pretrain.resume(run, steps=6)[0].run()
    assert json.loads((run / "run.json").read_text())["steps"] == 6


def test_a_finished_private_run_is_not_told_to_take_more_steps(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text, dp_clip=1.0, dp_noise=1.0, dp_delta=1e-4, steps=2)).run()
    with pytest.raises(ValueError, match="--lr has no effect: all 2 steps of the run are done; start a new run"):
        pretrain.resume(run, lr=1e-9)


def test_a_finished_run_is_shown_without_the_package_of_its_tracker(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for step in pretrain.start(run, options(text, log="tensorboard")):
        if step.step == 6:
            break
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)  # it cannot be imported
    code, output = onfoot("train", "--resume", run)
    assert code == 2 and "logging to TensorBoard needs its package" in " ".join(output.split())
    for more in (("--steps", 6), ()):
        code, output = onfoot("train", "--resume", run, *more)
        assert code == 0 and "is complete: all 6 steps are done" in " ".join(output.split())
    recorded = json.loads((run / "run.json").read_text())
    assert (recorded["steps"], recorded["log"]) == (6, "tensorboard")


def test_a_finished_run_does_not_continue_with_other_versions(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text)).run()
    known = runs.made_with
    monkeypatch.setattr(runs, "made_with", lambda *given: {**known(*given), "threads": 99})
    assert pretrain.resume(run)[1] == []
    assert "continues with threads 99" in " ".join(pretrain.resume(run, steps=12)[1])


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_missing_tracker_is_found_before_the_data_is_read(
    tmp_path: Path, text: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # it cannot be imported
    monkeypatch.setattr(pretrain, "make_trainer", None)  # nothing is read
    monkeypatch.setattr(finetune, "make_trainer", None)
    data = [text] if command == "train" else ["model", "--data", "d.jsonl"]
    code, output = onfoot(command, *data, "--log", "wandb", "--out", tmp_path / "run")
    assert code == 2 and "logging to Weights & Biases needs its package" in " ".join(output.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--on-long", "truncte"), "unknown on_long 'truncte'; choose from refuse, truncate, skip"),
        (("--lora-dropout", 2), "lora_dropout must be in [0, 1), got 2.0"),
        (("--r", 0), "r must be in 1 ... 16 for"),
        (("--r", 17), "r must be in 1 ... 16 for"),
        (("--alpha", 0), "alpha must be a finite number > 0, got 0.0"),
        (("--targets", "nope"), "no layer matches 'nope'; choose from"),
        (("--full", "--freeze", "nope"), "freeze: no parameter matches 'nope'"),
        (("--dpo", "--validation-data", "none.jsonl"), "none.jsonl does not exist"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_fine_tune_is_found_before_the_data_is_read(
    tmp_path: Path, text: Path, wrong: tuple[Any, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain.start(tmp_path / "base", options(text)).run()
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    monkeypatch.setattr(finetune, "load_source", None)  # nothing is read
    monkeypatch.setattr(finetune, "read_preferences", None)
    given = ("--data", tmp_path / "d.jsonl", "--out", tmp_path / "run")
    code, output = onfoot("finetune", tmp_path / "base", *given, *wrong)
    assert code == 2 and said in " ".join(output.split())
    assert not (tmp_path / "run").exists()


def test_a_private_run_keeps_its_steps(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    private = {"dp_clip": 1.0, "dp_noise": 1.0, "dp_delta": 1e-4, "steps": 2}
    pretrain.start(run, options(text, **private)).run()
    with pytest.raises(ValueError, match="ε depends on them"):
        pretrain.resume(run, steps=4)


def test_a_moved_run_goes_on(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "run", options(text)).run()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    trainer, _ = pretrain.resume(tmp_path / "elsewhere" / "moved", steps=12)
    outcome = trainer.run()
    assert outcome.state.step == 12 and outcome.checkpoint is not None and outcome.checkpoint.is_dir()


def test_a_moved_fine_tune_goes_on_from_another_folder(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away):
        folder.mkdir()
    monkeypatch.chdir(home)
    pretrain.start(Path("base"), options(text)).run()
    Path("d.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+", "completion": f"{a}"}) + "\n" for a in range(30)))
    settings = {"steps": 4, "batch_size": 2, "max_length": 16, "sample_tokens": 0, "quiet": True, "dtype": "float64"}
    finetune.start(Path("run"), FinetuneOptions(model="base", data=["d.jsonl"], **settings)).run()
    Path("run").rename(away / "moved")
    monkeypatch.chdir(away)
    trainer, warnings = finetune.resume(Path("moved"), steps=6)
    assert warnings == [] and trainer.run().state.step == 6
    (home / "d.jsonl").unlink()
    with pytest.raises(ValueError, match=r"d\.jsonl does not exist"):
        finetune.resume(Path("moved"), steps=8)


def test_early_stopping(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    settings = {"lr": 0.0, "patience": 2, "eval_every": 2, "steps": 30}  # a rate of 0 never improves
    outcome = pretrain.start(run, options(text, **settings)).run()
    assert outcome.state.step == 6 and outcome.stopped == "no better validation loss in 2 evaluations"
    resumed = pretrain.resume(run)[0]
    assert resumed.run().state.step == 6
    more = pretrain.resume(run, patience=4)[0]
    assert more.run().state.step == 10


def test_after_early_stopping_a_new_schedule_gets_the_patience_again(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    settings = {"lr": 0.0, "patience": 2, "eval_every": 2, "steps": 30}
    assert pretrain.start(run, options(text, **settings)).run().state.step == 6
    assert pretrain.resume(run, steps=40)[0].run().state.step == 10
    code, said = onfoot("train", "--resume", run, "--lr-floor", 0.5)
    assert code == 0 and "stopped at step 14: no better validation loss in 2 evaluations" in said
    assert f"to go on all the same: onfoot train --resume {run} --patience 0" in " ".join(said.split())
    code, said = onfoot("train", "--resume", run, "--patience", 0, "--steps", 16)
    assert code == 0 and "stopped" not in said


def test_an_extension_that_is_shorter_than_the_warmup_decays_too(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text)).run()
    code, said = onfoot("train", "--resume", run, "--steps", 14)
    assert code == 0 and "never decays" not in said
    assert "with steps 14 (was 10), warmup 1 (was 4): the learning rate goes from " in " ".join(said.split())
    rates = records(run, "lr")
    assert f"to 1.00e-02 over 1 step, then decays (cosine) to {rates[13]:.2e} at step 14" in " ".join(said.split())
    assert rates[10] == rates[11] == 1e-2 > rates[12] > rates[13]
    assert json.loads((run / "run.json").read_text())["changes"][0]["before"] == {"steps": 10, "warmup": 4}
    code, said = onfoot("train", "--resume", run, "--steps", 18, "--warmup", 8)  # asked for, so it is done, and said
    words = " ".join(said.split())
    assert "the warmup of 8 steps is not less than the 4 steps of the run from here on" in words
    rates = records(run, "lr")
    assert f"the learning rate goes from {rates[13]:.2e} to {rates[17]:.2e} at step 18, within the warmup" in words
    assert rates[14:] == sorted(rates[14:]) and rates[17] < 1e-2


def onfoot(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(w) for w in words])
    return result.exit_code, result.output


def test_options_from_a_file_and_printed(tmp_path: Path, text: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(f'steps = 7\nlr = 0.5\nn-embd = 24\nbetas = [0.8, 0.9]\ntexts = ["{text}"]\n')
    code, printed = onfoot("train", "--config", config, "--lr", "0.25", "--print-config")
    assert code == 0
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert onfoot("train", "--config", again, "--print-config") == (0, printed)
    lines = printed.splitlines()
    assert {"steps = 7", "lr = 0.25", "n_embd = 24", "betas = [0.8, 0.9]", "batch_size = 12"} <= set(lines)
    assert not (tmp_path / "runs").exists()


def test_a_runs_own_file_is_a_config(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "run", options(text)).run()
    code, printed = onfoot("train", "--config", tmp_path / "run" / "run.json", "--steps", 3, "--print-config")
    assert code == 0 and {"steps = 3", "n_embd = 16", "quiet = true"} <= set(printed.splitlines())
    code, said = onfoot("finetune", "--config", tmp_path / "run" / "run.json")
    assert code != 0 and "has the options of onfoot train, not of finetune" in said


def test_what_is_printed_with_epochs_is_a_config(tmp_path: Path, text: Path) -> None:
    code, printed = onfoot("train", text, "--epochs", 2, "--print-config")
    assert code == 0 and {"epochs = 2.0", "steps = 0"} <= set(printed.splitlines())
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert onfoot("train", "--config", again, "--print-config") == (0, printed)
    assert values_of("train", "--config", again, "--steps", 5)["epochs"] == "0.0"


def test_what_a_run_chose_from_its_data_is_chosen_anew_for_other_data(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "base", options(text)).run()

    def examples(name: str, n: int, length: int) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": f"{i}", "completion": "a" * length}) + "\n" for i in range(n)))
        return str(path)

    settings: dict[str, Any] = {"r": 3, "sample_tokens": 0, "quiet": True, "max_length": 16}
    first = examples("first.jsonl", 20, 2)
    run = tmp_path / "run"
    trainer = finetune.start(run, FinetuneOptions(model=str(tmp_path / "base"), data=[first], **settings))
    trainer.lock.release()
    file = run / "run.json"
    chosen = set(json.loads(file.read_text())["made_with"]["chosen"])
    assert chosen == {"batch_size", "accumulate", "row_length", "epochs", "steps", "lr", "warmup", "template"} & {
        name for name, value in vars(trainer.options).items() if value != getattr(FinetuneOptions(), name)
    }
    again = finetune.start(tmp_path / "again", FinetuneOptions(**typed_values(file)))  # the same data: the same choices
    assert again.options == trainer.options
    other = examples("other.jsonl", 300, 9)
    found = finetune.start(tmp_path / "other", FinetuneOptions(**{**typed_values(file), "data": [other]})).options
    fresh = finetune.start(
        tmp_path / "fresh", FinetuneOptions(model=str(tmp_path / "base"), data=[other], **settings)
    ).options
    assert found == fresh and found.row_length > trainer.options.row_length
    resumed, _ = finetune.resume(run, lr=0.25)  # given, so it is no choice any more
    resumed.lock.release()
    assert "lr" not in json.loads(file.read_text())["made_with"]["chosen"] and typed_values(file)["lr"] == 0.25
    with pytest.raises(ValueError, match="lr must be > 0 when a fine-tune is resumed, got 0"):
        finetune.resume(run, lr=0.0)


def typed_values(path: Path) -> dict[str, Any]:
    """The options in a file, as --config reads them."""
    return read_config(path, "finetune", FinetuneOptions)


def test_the_passes_of_a_resumed_run_count_the_rows_of_each_batch_size(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(text, steps=2, batch_size=4))
    trainer.run()
    code, said = onfoot("train", "--resume", run, "--steps", 6, "--batch-size", 2)
    assert code == 0
    passes = (2 * 4 + 4 * 2) / trainer.source.rows
    assert f"6 steps of 2 rows, {passes:.3g} pass" in " ".join(said.split())


@pytest.mark.parametrize("words", [("--max-iters", 3, "--steps", 4), ("--learning_rate=1", "--lr=2")])
def test_two_names_of_one_option_are_refused(words: tuple[object, ...]) -> None:
    code, said = onfoot("train", *words, "--print-config")
    first, second = (str(word).partition("=")[0] for word in words if str(word).startswith("--"))
    assert code != 0 and f"{first} and {second} are the same option; give one of them" in " ".join(said.split())


def test_the_files_of_a_runs_own_file_are_found_from_another_folder(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pretrain.start(Path("run"), options(Path("fox.txt"))).run()
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert values_of("train", "--config", "../run/run.json")["texts"] == f'["{text}"]'


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--min-lr=1e-4", "no option --min-lr; here the last rate is a fraction of --lr: --lr-floor 0.1"),
        ("--warmup_ratio=0.1", "here the warmup is in steps"),
        ("--adam-beta2=0.95", "give both betas: --betas 0.9 0.99"),
        ("--device=cuda", "onfoot computes on the CPU"),
        ("--eval_iters=20", "no option --eval-iters; --eval-windows is the number of validation sequences"),
        ("--lr_decay_iters=2000", "no option --lr-decay-iters; the learning rate decays over all --steps"),
        ("--init-from=resume", "no option --init-from; --init MODEL starts from a model, --resume RUN goes on"),
        ("--gradient-checkpointing=true", "no option --gradient-checkpointing; --recompute block"),
    ],
)
def test_an_option_that_means_something_else_here_is_answered_with_ours(given: str, said: str, tmp_path: Path) -> None:
    code, printed = onfoot("train", given, "--print-config")
    assert code != 0 and said in " ".join(printed.split())
    name, value = given[2:].split("=")
    (tmp_path / "theirs.json").write_text(json.dumps({name: value}))
    code, printed = onfoot("train", "--config", tmp_path / "theirs.json", "--print-config")
    assert code != 0 and said.partition("; ")[2] in " ".join(printed.split())


def test_more_names_of_transformers_are_understood() -> None:
    found = values_of("train", "--report_to", "tensorboard", "--early-stopping-patience=3", "--save_total_limit", 4)
    assert (found["log"], found["patience"], found["keep"]) == ('"tensorboard"', "3", "4")


def values_of(*words: object) -> dict[str, str]:
    """The options that a command with --print-config prints."""
    code, printed = onfoot(*words, "--print-config")
    assert code == 0, printed
    return dict(line.split(" = ", 1) for line in printed.splitlines())


def test_the_length_on_the_command_line_replaces_that_of_the_file_with_its_warmup(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("steps = 300\nwarmup = 30\n")  # the default for 300 steps, as --print-config writes it
    found = values_of("train", "--config", config, "--steps", 50)
    assert (found["steps"], found["warmup"]) == ("50", "5")
    found = values_of("train", "--config", config, "--epochs", 2)
    assert (found["steps"], found["epochs"], found["warmup"]) == ("0", "2.0", "-1")
    config.write_text("steps = 300\nwarmup = 7\n")  # chosen, so it stays
    assert values_of("train", "--config", config, "--steps", 50)["warmup"] == "7"
    config.write_text("epochs = 2.0\n")
    found = values_of("train", "--config", config, "--steps", 50)
    assert (found["steps"], found["epochs"]) == ("50", "0.0")
    code, said = onfoot("train", "--config", config, "--steps", 50, "--epochs", 1, "--print-config")
    assert code != 0 and "--epochs cannot be used with --steps" in said


def test_a_value_of_another_type_is_named_with_its_file(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    for line, expected in {
        'steps = "7"': "steps must be an integer, got '7'",
        "betas = [1]": "betas must be two numbers",
    }.items():
        config.write_text(line)
        code, said = onfoot("train", "--config", config, "--print-config")
        assert code == 2 and f"{config}: {expected}" in " ".join(said.split())
    assert onfoot("train", "--config", config, "--betas", 0.9, 0.99, "--print-config")[0] == 0  # not used
    other = tmp_path / "a.yaml"
    other.write_text("steps: 3")
    code, said = onfoot("train", "--config", other, "--print-config")
    assert code == 2 and f"{other} is YAML; write the options as TOML" in " ".join(said.split())


def test_the_file_of_a_fine_tune_can_be_made_longer_and_contradictions_are_named(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "base", options(text)).run()
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1=", "completion": f"{a + 1}"}) + "\n" for a in range(30)))
    settings = {"max_length": 16, "sample_tokens": 0, "quiet": True, "dtype": "float64", "epochs": 1.0}
    finetune.start(tmp_path / "run", FinetuneOptions(model=str(tmp_path / "base"), data=[str(data)], **settings)).run()
    file = tmp_path / "run" / "run.json"
    steps = json.loads(file.read_text())["steps"]
    assert steps > 1 and json.loads(file.read_text())["epochs"] == 1.0
    found = values_of("finetune", "--config", file)
    assert (found["steps"], found["epochs"]) == ("0", "1.0")  # its steps were computed from them, and are again
    found = values_of("finetune", "--config", file, "--epochs", 5)
    assert (found["steps"], found["epochs"]) == ("0", "5.0")
    config = tmp_path / "full.toml"
    config.write_text('model = "m"\ndata = ["d"]\nfull = true\nr = 4\n')
    code, said = onfoot("finetune", "--config", config)
    assert code != 0 and f"--full cannot be used with --r (in {config})" in " ".join(said.split())


def test_names_of_nanogpt_and_transformers_are_understood_in_files(tmp_path: Path) -> None:
    config = tmp_path / "theirs.toml"
    config.write_text("learning_rate = 0.5\nmax_iters = 70\nblock-size = 32\n")
    found = values_of("train", "--config", config)
    assert (found["lr"], found["steps"], found["context"]) == ("0.5", "70", "32")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stepz = 3", "unknown option stepz; did you mean steps?"),
        ("train = 3", "unknown option train; --print-config shows all options"),
        ("out = 'x'", "unknown option out; give --out on the command line"),
        ("lr = 0.1\nlearning_rate = 0.1", "learning_rate is given twice: lr has several names"),
        ("steps = 3\nepochs = 2.0", "steps and epochs both set the length of the run; keep one of them"),
        ("tokenizer = 'byte'\nvocab_size = 300", "--tokenizer byte cannot be used with --vocab-size (in "),
        ("steps = [", "Invalid"),
        ("steps = 'three'", "steps must be an integer"),
    ],
)
def test_bad_files_of_options(tmp_path: Path, content: str, said: str) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(content)
    code, printed = onfoot("train", "--config", config)
    assert code != 0 and said in " ".join(printed.split()) and "Traceback" not in printed
