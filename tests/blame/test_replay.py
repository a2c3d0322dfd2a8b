"""Replays: kept checkpoints, snapshots, temporary files, every engine and dropout give the same scores."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blame_runs import LOOP, gpt2_base, labelled_steps, lines, lora_options, scores_of, text

import onfoot
from onfoot.blame.leave_out import retrained_losses
from onfoot.blame.replay import Replay
from onfoot.blame.run import OpenRun, open_run
from onfoot.formats.run_folder import checkpoint_folder, checkpoints, step_of
from onfoot.train import finetune, pretrain
from onfoot.train.options import TrainOptions
from oracles import assert_close


def options(path: Path, **changes: Any) -> TrainOptions:
    sizes: dict[str, Any] = {"arch": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 6, "context": 7}
    return TrainOptions(texts=[str(text(path))], **{**LOOP, **sizes, **changes})


def train(run: Path, settings: TrainOptions) -> Path:
    pretrain.start(run, settings).run()
    return run


def files(run: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}


def test_keep_trajectory_keeps_the_initial_state_and_every_nth_checkpoint(tmp_path: Path) -> None:
    run = train(tmp_path / "run", options(tmp_path, keep_trajectory=2, keep=1, save_every=3, eval_every=5))
    assert [step_of(folder) for folder in checkpoints(run)] == [0, 2, 4, 6, 7]  # 7: the newest and the best
    without = train(tmp_path / "other", options(tmp_path, keep=1, save_every=3, eval_every=5))
    weights = [(r / "last" / "model.safetensors").read_bytes() for r in (run, without)]
    assert weights[0] == weights[1]


def test_a_run_resumes_from_the_initial_state(tmp_path: Path) -> None:
    run = train(tmp_path / "run", options(tmp_path, keep_trajectory=3))
    expected = (run / "last" / "model.safetensors").read_bytes()
    for step in (3, 6, 7):
        shutil.rmtree(checkpoint_folder(run, step))
    resumed, warnings = pretrain.resume(run)
    assert resumed.state.step == 0 and warnings == []
    resumed.run()
    assert (run / "last" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_scores_do_not_depend_on_where_states_come_from(tmp_path: Path, dtype: str) -> None:
    settings = options(tmp_path, dtype=dtype, engine="auto")
    plain = train(tmp_path / "plain", settings)
    before = files(plain)
    opened, expected, loss, _ = scores_of(plain)
    assert [step_of(folder) for folder in checkpoints(plain)] == [7]
    assert opened.replay.plan(7).segments == [(0, 7)]
    kept = train(tmp_path / "kept", options(tmp_path, dtype=dtype, engine="auto", keep_trajectory=3))
    opened, scores, kept_loss, _ = scores_of(kept)
    assert opened.replay.plan(7).segments == [(0, 3), (3, 6), (6, 7)] and kept_loss == loss
    assert (scores.totals == expected.totals).all()
    opened, scores, _, _ = scores_of(plain, memory=opened.replay.state_bytes * 20)  # not all steps fit: snapshots
    plan = opened.replay.plan(7)
    assert plan.stride == 3 and plan.memory and not plan.disk and plan.replayed == 7 + 6
    assert (scores.totals == expected.totals).all()
    opened, scores, _, _ = scores_of(plain, memory=1)
    assert opened.replay.plan(7).disk and not opened.replay.plan(7).memory
    assert (scores.totals == expected.totals).all()
    assert files(plain) == before  # nothing is written into the run


def test_two_queries_in_one_replay_have_the_scores_of_each(tmp_path: Path) -> None:
    from onfoot.blame.query import encode_query
    from onfoot.blame.scores import replay_backwards

    run = train(tmp_path / "run", options(tmp_path))
    opened, expected, _, _ = scores_of(run)
    replay = opened.replay
    replay.put_params(replay.at(7).params)
    asked = [encode_query(opened.trainer, {"prompt": p, "completion": c}) for p, c in (("ab", "cade"), ("", "dd"))]
    gradients = [replay.layout.flat(query.gradient(replay.model)) for query in asked]
    both = replay_backwards(replay, replay.backwards(replay.plan(7)), gradients, len(opened.examples))
    assert_close(both[0].totals, expected.totals, 1e-12)
    assert np.abs(both[1].totals - both[0].totals).max() > 1e-3


def weighted_loss(opened: OpenRun, query: Any, weights: np.ndarray) -> float:
    """The query's loss after training with these weights of the examples, by the model's own gradients, one by one."""
    replay, model = opened.replay, opened.replay.model
    replay.put(0, replay.initial)
    clip = opened.trainer.options.clip
    for step in range(opened.last):
        total: dict[str, np.ndarray] = {}
        batches, numbers = replay.microbatches(step), opened.trainer.source.example_numbers(step)
        count = 0.0
        for batch, mine in zip(batches, numbers, strict=True):
            for example in np.unique(mine[batch.targets != -100]):
                only = np.where(mine == example, batch.targets, -100)
                count += weights[example] * int((only != -100).sum())
                _, grads = model.loss_and_grads(
                    batch.tokens, only, divisor=1.0, segments=batch.segments, dropout_seed=batch.dropout_seed
                )
                for name, g in grads.items():
                    total[name] = total.get(name, 0.0) + weights[example] * g
        mean = {name: g / count for name, g in total.items()}
        norm = float(np.sqrt(sum((g**2).sum() for g in mean.values())))
        lr = opened.trainer.options.learning_rate(step)
        replay.optimizer.step(mean, lr, clip / norm if norm > clip else 1.0)
    return query.loss(model)


@pytest.mark.parametrize("kind", ["train", "lora"])
def test_scores_with_dropout_are_the_derivatives_of_weighted_training(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    if kind == "train":
        train(run, options(tmp_path, dropout=0.2, steps=5))
    else:
        settings = lora_options(gpt2_base(tmp_path), lines(tmp_path), dropout=0.2, lora_dropout=0.3, steps=5, clip=0.3)
        finetune.start(run, settings).run()
    opened, scores, loss, query = scores_of(run)
    ones = np.ones(len(opened.examples))
    assert weighted_loss(opened, query, ones) == pytest.approx(loss, rel=1e-9)
    for example in np.argsort(-np.abs(scores.totals))[:2]:
        moved = [ones + h * (np.arange(len(ones)) == example) for h in (1e-5, -1e-5)]
        slope = (weighted_loss(opened, query, moved[0]) - weighted_loss(opened, query, moved[1])) / 2e-5
        assert scores.totals[example] == pytest.approx(-slope, rel=1e-4)


def test_leaving_out_nothing_repeats_the_run_and_leaving_out_examples_ignores_their_targets(tmp_path: Path) -> None:
    run = train(tmp_path / "run", options(tmp_path))
    opened, scores, loss, query = scores_of(run)
    replay: Replay = opened.replay
    assert retrained_losses(replay, 7, [query], []) == [loss]
    seen = labelled_steps(opened)
    assert {e for step in seen for e, _, _ in step} == set(scores.by_step)
    example = int(np.argmax(np.abs(scores.totals)))
    weights = np.ones(len(opened.examples))
    weights[example] = 0
    expected = weighted_loss(opened, query, weights)
    assert retrained_losses(replay, 7, [query], [example])[0] == pytest.approx(expected, rel=1e-9)


def test_a_replay_that_differs_from_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    run = train(tmp_path / "run", options(tmp_path, keep_trajectory=3))
    opened = open_run(run, "last")
    replay = opened.replay
    step = replay.trainer.step

    def other(lr: float) -> Any:
        return step(lr * 1.001)

    replay.trainer.step = other  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"does not give its checkpoint of step 7: the states differ by up to .*threads"
    ):
        list(replay.backwards(replay.plan(7)))


def test_scores_since_a_step_leave_out_those_of_the_steps_before(tmp_path: Path) -> None:
    run = train(tmp_path / "run", options(tmp_path, keep_trajectory=3))
    opened, scores, _, _ = scores_of(run)
    replay = opened.replay
    assert replay.plan(7, 4).segments == [(3, 6), (6, 7)] and replay.plan(7, 4).steps == 3
    assert replay.plan(7, 3).segments == [(3, 6), (6, 7)] and replay.plan(7, 2).segments[0] == (0, 3)
    assert [step.number for step in replay.backwards(replay.plan(7, 4))] == [6, 5, 4]
    late = np.zeros(len(opened.examples))
    for example, seen in scores.by_step.items():
        late[example] = sum(score for step, score in seen if step >= 4)
    assert_close(scores_of(run, since=4)[1].totals, late, 1e-12)


@pytest.mark.parametrize(
    "changes", [{"engine": "torch"}, {"recompute": "block"}, {"clip": 0.0, "accumulate": 1, "batch_size": 4}]
)
def test_engines_recomputation_and_fused_steps_give_the_same_scores(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = {name: LOOP[name] for name in changes if name in LOOP} | ({"clip": 1e9} if "clip" in changes else {})
    expected = scores_of(train(tmp_path / "plain", options(tmp_path, **plain)))[1].totals
    found = scores_of(train(tmp_path / "other", options(tmp_path, **changes)))[1].totals
    assert np.abs(expected).max() > 1e-3
    assert_close(found, expected, 1e-7)


def test_a_quantized_base_has_the_scores_of_the_same_weights_as_floats(tmp_path: Path) -> None:
    base, data = gpt2_base(tmp_path, n_embd=32), lines(tmp_path)
    rounded = onfoot.load(base, quantized=True)
    floats = onfoot.Model(rounded.config, {name: np.asarray(p) for name, p in rounded.params.items()})
    floats.tokenizer = rounded.tokenizer
    floats.save(tmp_path / "floats")
    settings = {"dtype": "float32", "engine": "auto", "steps": 5, "lr": 1e-3}
    finetune.start(tmp_path / "a", lora_options(base, data, quantized=True, **settings)).run()
    finetune.start(tmp_path / "b", lora_options(tmp_path / "floats", data, **settings)).run()
    blocks, plain = (scores_of(tmp_path / name)[1].totals for name in "ab")
    assert_close(blocks, plain, 1e-2)


@pytest.mark.slow
def test_predictions_correlate_with_retrained_losses(tmp_path: Path) -> None:
    facts = "".join(f"{a} has {b}.\n" for a in ("ann", "bob", "cid", "dan", "eve") for b in ("a cat", "a dog", "bees"))
    (tmp_path / "facts.txt").write_text("".join(np.random.default_rng(0).permutation(facts.splitlines(True) * 12)))
    settings = TrainOptions(
        texts=[str(tmp_path / "facts.txt")], tokenizer="char", arch="gpt2", n_layer=1, n_head=2, n_embd=32, context=24,
        steps=200, batch_size=12, lr=3e-4, warmup=50, keep_trajectory=50, eval_every=1000, sample_tokens=0,
    )  # fmt: skip
    opened, scores, loss, query = scores_of(
        train(tmp_path / "run", settings), query={"prompt": "ann has", "completion": " bees."}
    )
    rng = np.random.default_rng(1)
    seen = sorted(scores.by_step)
    groups = [rng.choice(seen, size, replace=False).tolist() for size in (1, 5) for _ in range(15)]
    predicted = [scores.totals[group].sum() for group in groups]
    actual = [retrained_losses(opened.replay, opened.last, [query], group)[0] - loss for group in groups]
    assert np.corrcoef(predicted, actual)[0, 1] > 0.95
