"""Runs: accumulation, checkpoints, kill and resume, and rejected options."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.data.batches import Batch
from onfoot.formats.run_folder import checkpoints, model_folder, newest_valid, validate
from onfoot.formats.tensors import TensorFile
from onfoot.models.model import Model
from onfoot.train import pretrain
from onfoot.train.log import Log
from onfoot.train.loop import Outcome, Trainer
from onfoot.train.options import TrainOptions
from onfoot.train.schedule import learning_rate
from oracles import assert_close, gpt2_logits, scrambled

TEXT = "the quick brown fox jumps over the lazy dog while the cat looks on. " * 60
SMALL: dict[str, Any] = {
    "arch": "gpt2", "lr": 2e-3,
    "n_layer": 2, "n_head": 2, "n_embd": 16, "context": 16, "batch_size": 2, "accumulate": 2, "steps": 12,
    "warmup": 2, "eval_every": 4, "save_every": 3, "eval_windows": 4, "keep": 10, "sample_tokens": 5, "dropout": 0.1,
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def options(text: Path, **changes: Any) -> TrainOptions:
    return TrainOptions(texts=[str(text)], **{**SMALL, **changes})


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in TensorFile(folder / "model.safetensors").items()}


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert set(a) == set(b)
    for name in a:
        assert (a[name] == b[name]).all(), name


def test_microbatches_of_unequal_target_counts_equal_one_big_batch(tmp_path: Path) -> None:
    config = onfoot.GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    params = scrambled(onfoot.create(config).params, 0)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 13, (8, 8)), rng.integers(0, 13, (8, 8))
    for row, hidden in enumerate((0, 7, 3, 5, 1, 6, 2, 4)):
        targets[row, :hidden] = -100
    model = Model(config, params, "float64")
    loss, grads = model.loss_and_grads(tokens, targets)
    total: dict[str, np.ndarray] = {}
    summed = 0.0
    divisor = int((targets != -100).sum())
    for rows in np.array_split(np.arange(8), [1, 4, 6]):
        part, part_grads = model.loss_and_grads(tokens[rows], targets[rows], divisor=divisor)
        summed += part
        total = {k: total.get(k, 0) + g for k, g in part_grads.items()}
    assert summed == pytest.approx(loss, rel=1e-12)
    for name, grad in grads.items():
        assert_close(total[name], grad, 1e-12, name)

    class Source:
        def __init__(self, parts: list[np.ndarray]) -> None:
            self.parts = parts

        def microbatches(self, step: int) -> list[Batch]:
            return [Batch(tokens[rows], targets[rows]) for rows in self.parts]

        def validation(self) -> list[Batch]:
            return [Batch(tokens, targets)]

        def prompt(self) -> None:
            return None

    results = []
    for i, parts in enumerate(([np.arange(8)], np.array_split(np.arange(8), [1, 4, 6]))):
        model = Model(config, params, "float64")
        run = tmp_path / str(i)
        run.mkdir()
        Trainer(model, Source(parts), TrainOptions(steps=3, dtype="float64"), out=run).run()
        results.append(model.params)
    for name in params:
        assert_close(results[1][name], results[0][name], 1e-11, name)


def test_a_run_writes_its_log_its_curve_and_checkpoints_that_load(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    outcome = pretrain.start(run, options(text, watch=True)).run()
    assert outcome.state.step == 12 and not outcome.interrupted
    records = Log(run / "log.jsonl").read()
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 12 and losses[-1] < losses[0]
    evaluations = [r for r in records if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [4, 8, 12]
    for record in evaluations:
        assert record["invariants"]["gradient_of_b_k"] < 1e-5
        assert record["invariants"]["rows_of_delta_causal"] < 1e-5
        assert record["invariants"]["features_of_layer_norm"] < 1e-5
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in checkpoints(run)][-1] == "step-0000012"
    assert (run / "last").resolve() == checkpoints(run)[-1]
    model = onfoot.load(run)
    assert model_folder(run) == (run / "best").resolve()
    best = min(evaluations, key=lambda r: r["val_loss"])
    assert json.loads((run / "best" / "trainer" / "state.json").read_text())["step"] == best["step"]
    assert model.tokenizer is not None and model.tokenizer.encode("fox")


def test_old_checkpoints_are_removed_but_never_the_best(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    worse = options(text, keep=1, lr=30.0, clip=0.0, warmup=0, steps=9, eval_every=3, schedule="constant")
    pretrain.start(run, worse).run()
    steps = {int(p.name[5:]) for p in checkpoints(run)}
    best = json.loads((run / "last" / "trainer" / "state.json").read_text())["best_step"]
    assert best < 9 and steps == {9, best}
    assert model_folder(run) == checkpoints(run)[0]


def interrupted_run(run: Path, settings: TrainOptions, at: int) -> Outcome:
    """A run that gets a Ctrl-C during step number `at`."""
    trainer = pretrain.start(run, settings)
    step = trainer.step

    def step_then_interrupt(lr: float) -> Any:
        result = step(lr)
        if trainer.state.step + 1 == at:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    trainer.step = step_then_interrupt  # type: ignore[method-assign]
    return trainer.run()


@pytest.mark.parametrize("interrupted_at", [1, 3, 7, 11])
def test_an_interrupted_run_resumes_to_bit_identical_weights(tmp_path: Path, text: Path, interrupted_at: int) -> None:
    whole = pretrain.start(tmp_path / "whole", options(text))
    whole.run()

    run = tmp_path / "cut"
    outcome = interrupted_run(run, options(text), interrupted_at)
    assert outcome.interrupted and outcome.state.step == interrupted_at
    resumed, complaints = pretrain.resume(run)
    assert complaints == [] and resumed.state.step == interrupted_at
    resumed.run()
    assert_same_weights(tmp_path / "whole" / "last", run / "last")
    steps = [r["step"] for r in Log(run / "log.jsonl").read() if "loss" in r]
    assert steps == list(range(1, 13))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "onfoot", *arguments]


LONG = 60  # steps of a run that is to be killed, at the latest in step 40


def arguments(text: Path, run: Path) -> list[str]:
    out = ["train", str(text), "--out", str(run)]
    for name, value in {**SMALL, "steps": LONG, "save_every": 2}.items():
        out += [f"--{name.replace('_', '-')}", str(value)]
    return out


def killed_at(text: Path, run: Path, step: int, pause: float) -> bool:
    """Kills a run so many seconds after its log has reached the step; False if the run was over before."""
    process = subprocess.Popen(command(*arguments(text, run)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 600  # for what hangs; a slow machine may take its time
    while process.poll() is None and not ((run / "run.json").exists() and logged(run) >= step):
        assert time.monotonic() < deadline, process.kill()
        time.sleep(0.001)
    time.sleep(pause)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return not (run / "checkpoints" / f"step-{LONG:07d}").exists()


def logged(run: Path) -> int:
    """The last step in a run's log."""
    return max((r["step"] for r in Log(run / "log.jsonl").read()), default=0)


def kill_and_resume(tmp_path: Path, text: Path, moments: list[float]) -> None:
    """Kills a run at each of the moments, a step and a fraction of 10 ms, and resumes it each time."""
    subprocess.run(command(*arguments(text, tmp_path / "whole")), check=True, capture_output=True, timeout=600)
    for i, moment in enumerate(moments):
        run = tmp_path / f"killed-{i}"
        for _ in range(20):
            if killed_at(text, run, int(moment), moment % 1 * 0.01):
                break
            shutil.rmtree(run)  # this process slept while the run came to its end: the same moment once more
        else:
            pytest.fail(f"the run was over each time before it could be killed at {moment}")
        result = subprocess.run(command("train", "--resume", str(run)), capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stderr
        assert_same_weights(tmp_path / "whole" / "last", run / "last")
        assert [r["step"] for r in Log(run / "log.jsonl").read() if "loss" in r] == list(range(1, LONG + 1))
        shutil.rmtree(run)


def test_a_killed_run_resumes_to_bit_identical_weights(tmp_path: Path, text: Path, fresh: int) -> None:
    kill_and_resume(tmp_path, text, [0.0, *np.random.default_rng(fresh).uniform(1, 40, 2).tolist()])


@pytest.mark.slow
def test_ten_kills_at_random_moments_all_resume_to_bit_identical_weights(
    tmp_path: Path, text: Path, fresh: int
) -> None:
    kill_and_resume(tmp_path, text, np.random.default_rng(fresh).uniform(0, 40, 10).tolist())


def test_a_run_killed_before_its_first_checkpoint_restarts(tmp_path: Path, text: Path) -> None:
    whole = pretrain.start(tmp_path / "whole", options(text))
    whole.run()
    run = tmp_path / "run"
    pretrain.start(run, options(text))  # prepared, but never trained
    shutil.rmtree(run / "data")  # not even its tokens were ready
    resumed, _ = pretrain.resume(run)
    resumed.run()
    assert_same_weights(tmp_path / "whole" / "last", run / "last")


def test_a_run_does_not_resume_with_other_tokens(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    interrupted_run(run, options(text), 4)
    path = run / "data" / "tokens.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))  # one token is another; the length stays
    with pytest.raises(ValueError, match=r"tokens\.bin has changed since the run started .* start a new run"):
        pretrain.resume(run)
    path.write_bytes(content)
    resumed, _ = pretrain.resume(run)
    assert resumed.state.step == 4


@pytest.mark.parametrize(
    "damage",
    [
        "truncate",
        "manifest",
        pytest.param("flip", marks=pytest.mark.slow),
        pytest.param("remove", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, text: Path, damage: str) -> None:
    run = tmp_path / "run"
    pretrain.start(run, options(text)).run()
    reference = weights(run / "last")
    newest, before = checkpoints(run)[-1], checkpoints(run)[-2]
    path = newest / ("trainer/manifest.json" if damage == "manifest" else "model.safetensors")
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
    else:
        path.write_bytes(content[:-20])
    found, complaints = newest_valid(run)
    assert found == before
    assert len(complaints) == 1 and str(newest) in complaints[0]
    if damage != "manifest":
        assert "model.safetensors" in complaints[0]
    resumed, said = pretrain.resume(run)
    assert said == [f"{complaints[0]}; renamed to damaged-{newest.name}"]
    assert validate(newest.with_name(f"damaged-{newest.name}")) and (run / "last").resolve() == before.resolve()
    resumed.run()
    assert validate(newest) is None  # written again
    assert all((weights(run / "last")[k] == reference[k]).all() for k in reference)


def test_a_full_disk_leaves_the_checkpoints_before_intact(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    interrupted_run(run, options(text), 4)
    sound = checkpoints(run)
    assert sound and all(validate(p) is None for p in sound)

    resumed, _ = pretrain.resume(run)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing beyond the limit then fails as on a full disk
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(ValueError, match=r"cannot write the checkpoint .*; earlier checkpoints are intact"):
            resumed.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints(run) == sound and all(validate(p) is None for p in sound)
    assert not list((run / "checkpoints").glob(".writing-*"))
    again, _ = pretrain.resume(run)
    again.run()
    whole = pretrain.start(tmp_path / "whole", options(text))
    whole.run()
    assert_same_weights(tmp_path / "whole" / "last", run / "last")


def test_a_non_finite_loss_names_the_step_and_overwrites_nothing(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(text))
    step = trainer.step

    def poisoned(lr: float) -> Any:
        if trainer.state.step == 7:
            trainer.model.params["transformer.ln_f.weight"][0] = np.nan
        return step(lr)

    trainer.step = poisoned  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"step 8: the loss is nan .* no checkpoint was overwritten"):
        trainer.run()
    found, complaints = newest_valid(run)
    assert found is not None and found.name == "step-0000006" and complaints == []
    assert all(np.isfinite(w).all() for w in weights(found).values())


def test_a_diverged_run_does_not_become_the_best(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    trainer = pretrain.start(run, options(text))
    evaluate = trainer.evaluate

    def poisoned() -> Any:
        if trainer.state.step == 8:
            trainer.model.params["transformer.ln_f.weight"][0] = np.nan
        return evaluate()

    trainer.evaluate = poisoned  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the validation loss is nan"):
        trainer.run()
    assert model_folder(run).name == "step-0000004"
    assert all(np.isfinite(w).all() for w in weights(model_folder(run)).values())


def test_one_step_is_the_gradient_clipped_and_pytorchs_adamw(tmp_path: Path, text: Path) -> None:
    settings = options(text, dtype="float64", dropout=0.0, clip=0.05, betas=(0.8, 0.9), weight_decay=0.3, lr=0.02)
    trainer = pretrain.start(tmp_path / "run", settings)
    leaves = {k: torch.tensor(v, requires_grad=True) for k, v in trainer.model.params.items()}
    groups = [
        {"params": [p for p in leaves.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in leaves.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.9))
    for step in range(3):
        peer.zero_grad()
        batches = trainer.source.microbatches(step)
        n = sum(int((b.targets != -100).sum()) for b in batches)
        for batch in batches:
            logits = gpt2_logits(leaves, trainer.model.config, torch.tensor(batch.tokens)).flatten(0, 1)
            targets = torch.tensor(batch.targets).flatten()
            (torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / n).backward()
        for i in range(2):  # autograd's noise around 0, which Adam would blow up to whole steps
            leaves[f"transformer.h.{i}.attn.c_attn.bias"].grad[16:32] = 0
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.05)
        lr = learning_rate(step, settings.steps, 0.02, settings.warmup)
        for group in peer.param_groups:
            group["lr"] = lr
        peer.step()
        ours = trainer.step(lr).grad_norm
        trainer.state.step += 1
        assert ours == pytest.approx(float(norm), rel=1e-7)  # PyTorch adds 1e-6 to the norm when it clips
    for name, leaf in leaves.items():
        assert_close(trainer.model.params[name], leaf.detach().numpy(), 1e-6, name)


def test_the_loop_follows_the_schedule(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "run", options(text, schedule="linear")).run()
    rates = [r["lr"] for r in Log(tmp_path / "run" / "log.jsonl").read() if "loss" in r]
    assert rates == [learning_rate(s, 12, 2e-3, 2, "linear") for s in range(12)]


def test_a_copy_that_followed_the_links_gets_new_ones(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    interrupted_run(run, options(text), 7)
    shutil.copytree(run, tmp_path / "copy", symlinks=False)
    resumed, _ = pretrain.resume(tmp_path / "copy")
    resumed.run()
    assert (tmp_path / "copy" / "last").is_symlink()
    assert (tmp_path / "copy" / "last").resolve().name == "step-0000012"


def test_a_run_is_trained_by_one_process_at_a_time_and_a_rejected_one_truncates_nothing(
    tmp_path: Path, text: Path
) -> None:
    trainer = pretrain.start(tmp_path / "run", options(text))
    step, log = trainer.step, tmp_path / "run" / "log.jsonl"

    def meanwhile(lr: float) -> Any:
        if trainer.state.step == 5:  # the last checkpoint is of step 4: a resumed run would drop what is logged of 5
            before = log.read_bytes()
            with pytest.raises(ValueError, match="is being trained by another process"):
                pretrain.resume(tmp_path / "run")
            assert log.read_bytes() == before
        return step(lr)

    trainer.step = meanwhile  # type: ignore[method-assign]
    assert not trainer.run().interrupted


def test_a_model_can_be_trained_further_on_other_text(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "first", options(text)).run()
    start = weights(tmp_path / "first" / "best")
    other = tmp_path / "other.txt"
    other.write_text("lorem ipsum dolor sit amet " * 80)
    trainer = pretrain.start(tmp_path / "second", options(other, init=str(tmp_path / "first"), context=8))
    assert all((trainer.model.params[k] == start[k]).all() for k in start)
    trainer.run()
    assert any((trainer.model.params[k] != start[k]).any() for k in start)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 4000}, "less than one window of 4000"),
        ({"n_embd": 15}, "n_embd=15 is not divisible by n_head=2"),
        ({"tokenizer": "nope"}, "tokenizer nope does not exist; built-in tokenizers: byte, char, bpe"),
        ({"texts": ["missing.txt"]}, "missing.txt does not exist"),
        ({"init": "missing"}, "missing is not a folder"),
    ],
    ids=str,
)
def test_a_run_that_cannot_begin_leaves_nothing_behind(
    tmp_path: Path, text: Path, changes: dict[str, Any], message: str
) -> None:
    settings = {"texts": [str(text)], **SMALL, **changes}
    with pytest.raises(ValueError, match=message):
        pretrain.start(tmp_path / "run", TrainOptions(**settings))
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_begin_leaves_the_users_own_folder(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    with pytest.raises(ValueError, match="less than one window"):
        pretrain.start(run, options(text, context=4000))
    assert run.is_dir() and not list(run.iterdir())
    pretrain.start(run, options(text))  # and can begin there after all
    assert (run / "run.json").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"lr": -0.1}, "lr must be >= 0, got -0.1"),
        ({"validation": 1.0}, "validation must be in \\(0, 1\\), got 1.0"),
        ({"schedule": "step"}, "unknown schedule 'step'"),
        ({"engine": "gpu"}, "unknown engine 'gpu'"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
    ids=str,
)
def test_bad_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**changes)


def test_used_folders_and_folders_without_a_run_are_rejected(tmp_path: Path, text: Path) -> None:
    pretrain.start(tmp_path / "run", options(text))
    with pytest.raises(ValueError, match="already contains a run; resume it with --resume"):
        pretrain.start(tmp_path / "run", options(text))
    with pytest.raises(ValueError, match="is not empty"):
        pretrain.start(tmp_path, options(text))
    with pytest.raises(ValueError, match=r"it has no run\.json"):
        pretrain.resume(tmp_path)
    with pytest.raises(ValueError, match="has no valid checkpoint yet"):
        (tmp_path / "run" / "checkpoints").mkdir()
        onfoot.load(tmp_path / "run")


def test_a_context_longer_than_the_model_is_refused(tmp_path: Path, text: Path) -> None:
    onfoot_model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    from onfoot.formats.tokenizer import byte_tokenizer

    onfoot_model.tokenizer = byte_tokenizer()
    onfoot_model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"context=16 exceeds n_positions=8 of .*; pass --context 8"):
        pretrain.start(tmp_path / "run", options(text, init=str(tmp_path / "model")))
