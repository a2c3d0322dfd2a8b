"""Details of a step: seeds of microbatches, clipping of large models, large vocabularies, chunk boundaries."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.data import corpus
from onfoot.data.corpus import Text, open_tokens, write_tokens
from onfoot.data.sft import SftSource
from onfoot.data.sft_examples import split_examples
from onfoot.models.model import Model
from onfoot.train import pretrain
from onfoot.train.buckets import GradientAccumulator
from onfoot.train.callbacks import Checkpoints
from onfoot.train.log import Log
from onfoot.train.loop import Trainer
from onfoot.train.optimizer import UPDATE_ELEMENTS, AdamW, clip_scale, global_norm
from onfoot.train.options import TrainOptions
from onfoot.train.schedule import learning_rate
from oracles import assert_close, scrambled


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 40)
    return path


def trainer(folder: Path, text: Path, **changes: Any) -> Trainer:
    options = {
        "n_layer": 1, "n_head": 1, "n_embd": 8, "context": 8, "batch_size": 2, "accumulate": 3, "steps": 4,
        "eval_every": 100, "save_every": 100, "eval_windows": 2, "sample_tokens": 0, "warmup": 1, "dropout": 0.2,
        "clip": 0.05, "dtype": "float64",
    }  # fmt: skip
    return pretrain.start(folder, TrainOptions(texts=[str(text)], **{**options, **changes}))


def asked_seeds(one: Trainer, monkeypatch: pytest.MonkeyPatch, steps: int) -> list[int]:
    """The dropout seeds of that many steps, microbatch by microbatch."""
    seen: list[int] = []
    right = one.model.loss_and_grads

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(named["dropout_seed"])
        return right(*arguments, **named)

    monkeypatch.setattr(one.model, "loss_and_grads", watched)
    for _ in range(steps):
        one.step(1e-3)
        one.state.step += 1
    return seen


def test_every_microbatch_of_every_step_has_its_own_dropout_seed(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = asked_seeds(trainer(tmp_path / "a", text), monkeypatch, 4)
    assert len(seeds) == len(set(seeds)) == 4 * 3
    again = trainer(tmp_path / "b", text)
    again.state.step = 2
    assert asked_seeds(again, monkeypatch, 2) == seeds[6:]  # a resumed run drops as if it had not been interrupted
    other = asked_seeds(trainer(tmp_path / "c", text, seed=1), monkeypatch, 4)
    assert not {*other} & {*seeds}


def test_every_rank_has_its_own_dropout_seed(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tmp_path / "a", text)
    seeds = set()
    for rank in range(4):
        monkeypatch.setattr(one, "world", type("Rank", (), {"rank": rank})())
        seeds |= {one.dropout_seed(i) for i in range(3)}
    assert len(seeds) == 12


def test_a_step_over_microbatches_is_one_step_of_the_clipped_mean_gradient(tmp_path: Path, text: Path) -> None:
    one = trainer(tmp_path / "a", text)
    batches = one.source.microbatches(0)
    for i, batch in enumerate(batches):
        batch.targets[:, : 2 * i + 1] = -100  # another number of targets in each
    one.source = SimpleNamespace(microbatches=lambda *_: batches)  # type: ignore[assignment]
    n = sum(int((b.targets != -100).sum()) for b in batches)
    assert n == 2 * (7 + 5 + 3)
    before = {name: torch.tensor(np.array(value)) for name, value in one.model.params.items()}
    total: dict[str, np.ndarray] = {}
    expected = 0.0
    for i, batch in enumerate(batches):
        loss, grads = one.model.loss_and_grads(batch.tokens, batch.targets, divisor=n, dropout_seed=one.dropout_seed(i))
        expected += loss
        for name, grad in grads.items():
            total[name] = total.get(name, 0) + np.array(grad)
    loss, norm, n_tokens, _ = one.step(1e-2)
    assert loss == pytest.approx(expected, rel=1e-12) and n_tokens == 3 * 2 * 8
    length = math.sqrt(sum((g**2).sum() for g in total.values()))
    assert norm == pytest.approx(length, rel=1e-12) and length > 0.05
    leaves = {name: value.requires_grad_() for name, value in before.items()}
    groups = [
        {
            "params": [x for x in leaves.values() if (x.ndim > 1) == decays],
            "weight_decay": one.optimizer.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=one.optimizer.betas, eps=1e-8)
    for name, leaf in leaves.items():
        leaf.grad = torch.tensor(total[name] * 0.05 / length)
    theirs.step()
    for name, leaf in leaves.items():
        assert_close(one.model.params[name], leaf.detach().numpy(), 1e-9, name)


def test_a_step_that_updates_at_once_is_the_step_that_keeps_all_gradients(tmp_path: Path, text: Path) -> None:
    """Without clipping, the optimizer is fused into the backward pass; a limit never reached changes nothing."""
    fused, kept = (trainer(tmp_path / str(clip), text, accumulate=1, clip=clip) for clip in (0.0, 1e9))
    found, expected = fused.step(1e-2), kept.step(1e-2)
    assert found[0] == pytest.approx(expected[0], rel=1e-12) and found[2] == expected[2]
    assert found[1] == pytest.approx(expected[1], rel=1e-12) and found[1] > 0.05
    for name, value in kept.model.params.items():
        assert_close(fused.model.params[name], value, 1e-12, name)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_loss_that_is_not_finite_ends_the_step_before_any_update(tmp_path: Path, text: Path, clip: float) -> None:
    one = trainer(tmp_path / "nan", text, accumulate=1, clip=clip)
    before = {name: value.copy() for name, value in one.model.params.items()}
    one.model.params["model.norm.weight"][:] = np.nan
    with pytest.raises(ValueError, match=r"the loss is nan"):
        one.step(1e-2)
    for name in set(before) - {"model.norm.weight"}:
        np.testing.assert_array_equal(one.model.params[name], before[name])


def test_the_validation_loss_is_the_mean_over_the_targets_that_count(tmp_path: Path, text: Path) -> None:
    one = trainer(tmp_path / "masked", text, eval_windows=3)
    batches = list(one.source.validation())
    for batch in batches:
        batch.targets[:, :5] = -100
    one.source = SimpleNamespace(validation=lambda *_: batches)  # type: ignore[assignment]
    losses = [one.model.loss(b.tokens, b.targets, divisor=1.0) for b in batches]
    n = sum(int((b.targets != -100).sum()) for b in batches)
    validation = one.evaluate()
    assert validation is not None and n < sum(b.targets.size for b in batches)
    assert validation.loss == pytest.approx(sum(losses) / n, rel=1e-12)


def test_clipping_reaches_the_parameters_that_are_updated_before_the_last() -> None:
    """Updates of more than 2²⁰ elements are applied at once; each must be scaled all the same."""
    config = onfoot.GPT2Config(vocab_size=9000, n_positions=16, n_embd=128, n_layer=2, n_head=2)
    model = onfoot.create(config, dtype="float64", engine="numpy")
    assert model.n_params > UPDATE_ELEMENTS + 2 * 12 * 128**2
    rng = np.random.default_rng(0)
    grads = {name: rng.normal(size=value.shape) for name, value in model.params.items()}
    leaves = {name: torch.tensor(np.array(value), requires_grad=True) for name, value in model.params.items()}
    theirs = torch.optim.AdamW(
        [
            {"params": [x for x in leaves.values() if x.ndim > 1], "weight_decay": 0.1},
            {"params": [x for x in leaves.values() if x.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.9, 0.95), eps=1.0,
    )  # fmt: skip
    ours = AdamW(model, lr=1e-2, eps=1.0)  # with an epsilon that large the size of a gradient matters
    for scale in (0.25, 0.5):
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(scale * grads[name])
        theirs.step()
        ours.step(grads, scale=scale)
    for name, leaf in leaves.items():
        assert_close(model.params[name], leaf.detach().numpy(), 1e-10, name)


def test_the_norm_is_that_of_all_gradients_as_one_vector() -> None:
    grads = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]]), "c": np.array([12.0])}
    assert global_norm(grads) == 13
    assert clip_scale(13.0, 6.5) == 0.5 and clip_scale(6.5, 6.5) == clip_scale(1.0, 6.5) == clip_scale(13.0, 0.0) == 1


def test_the_sum_of_squares_has_the_same_bits_in_whatever_order_gradients_come() -> None:
    config = onfoot.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=2, n_head=1)
    optimizer = AdamW(onfoot.create(config, dtype="float64", engine="numpy"))
    rng = np.random.default_rng(0)
    grads = {name: rng.normal(size=p.shape) * 10.0 ** rng.integers(-9, 9) for name, p in optimizer.model.params.items()}
    orders = [rng.permutation(sorted(grads)).tolist() for _ in range(20)]
    assert len({sum(float((grads[name] ** 2).sum()) for name in order) for order in orders}) > 1  # it would matter
    (found,) = {optimizer.squares({name: grads[name] for name in order}) for order in orders}
    assert found == pytest.approx(sum(float((g**2).sum()) for g in grads.values()), rel=1e-14)


def test_a_learning_rate_passed_to_a_step_applies_to_that_step_only() -> None:
    config = onfoot.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    model = Model(config, scrambled(onfoot.create(config).params, 0), "float64", "numpy")
    before = {name: value.copy() for name, value in model.params.items()}
    grads = {name: np.ones_like(value) for name, value in model.params.items()}
    optimizer = AdamW(model, lr=1e-3, weight_decay=0.0)
    optimizer.step(grads, lr=0.0)
    assert all((model.params[name] == before[name]).all() for name in before)
    optimizer.step(grads)
    for name in before:
        assert_close(before[name] - model.params[name], np.full_like(before[name], 1e-3), 1e-6, name)


def test_a_restored_optimizer_continues_with_its_step_count() -> None:
    config = onfoot.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    models = [Model(config, scrambled(onfoot.create(config).params, 0), "float64", "numpy") for _ in range(2)]
    rng = np.random.default_rng(0)
    grads = [{name: rng.normal(size=value.shape) for name, value in models[0].params.items()} for _ in range(4)]
    whole = AdamW(models[0])
    for one in grads:
        whole.step(one)
    first = AdamW(models[1])
    for one in grads[:2]:
        first.step(one)
    second = AdamW(models[1])
    second.restore(first.moments(), first.steps)
    for one in grads[2:]:
        second.step(one)
    for name, value in models[0].params.items():
        np.testing.assert_array_equal(models[1].params[name], value)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedules_have_these_values(kind: str) -> None:
    rates = [learning_rate(step, 12, 2.0, 4, kind) for step in range(12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    done = [(step - 4) / 8 for step in range(4, 12)]
    if kind == "constant":
        assert rates[4:] == [2.0] * 8
    elif kind == "linear":
        assert rates[4:] == pytest.approx([0.2 + 1.8 * (1 - d) for d in done])
    else:
        assert rates[4:] == pytest.approx([0.2 + 0.9 * (1 + math.cos(math.pi * d)) for d in done])
    assert learning_rate(50, 12, 2.0, 4, kind) == pytest.approx(2.0 if kind == "constant" else 0.2)


class Large:
    """A tokenizer with `size` ids that uses only the last ones."""

    def __init__(self, size: int) -> None:
        self.size, self.eos_id = size, size - 1

    def encode(self, text: str) -> list[int]:
        return [self.size - 1 - ord(c) % 7 for c in text]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(300, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (131_072, "uint32"), (200_000, "uint32")],
)
def test_ids_of_large_vocabularies_are_not_truncated(tmp_path: Path, size: int, dtype: str) -> None:
    tokenizer: Any = Large(size)
    texts = [Text("a", text="hello"), Text("b", text="world")]
    tokens = write_tokens(texts, tokenizer, tmp_path)
    expected = [*tokenizer.encode("hello"), size - 1, *tokenizer.encode("world"), size - 1]
    assert tokens.tolist() == open_tokens(tmp_path).tolist() == expected and max(expected) == size - 1
    assert tokens.dtype == dtype
    assert json.loads((tmp_path / "tokens.json").read_text())["tokens"] == 12
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes() + b"\0")
    with pytest.raises(ValueError, match="which is not 12 "):
        open_tokens(tmp_path)


def test_the_number_of_validation_examples_is_rounded_to_nearest() -> None:
    examples: list[Any] = list(range(19))
    for fraction, n in ((0.1, 2), (0.12, 2), (0.14, 3), (0.001, 1), (0.99, 18)):
        train, held_out = split_examples(examples, fraction, 0)
        assert (len(train), len(held_out)) == (19 - n, n) and sorted([*train, *held_out]) == examples


def test_validation_takes_shuffled_rows_for_the_first_of_a_packing_are_the_longest() -> None:
    rows: Any = SimpleNamespace(order=lambda epoch: np.array([3, 1, 0, 2]), batch=list, __len__=lambda: 4)
    source = SftSource(rows, rows, batch_size=2, eval_rows=3)
    assert [[int(i) for i in batch] for batch in source.validation()] == [[3, 1], [0]]


def test_changed_token_ids_are_rejected(tmp_path: Path) -> None:
    tokenizer: Any = Large(300)
    write_tokens([Text("a", text="hello")], tokenizer, tmp_path)
    corpus.check_tokens(tmp_path)
    path = tmp_path / "tokens.bin"
    data = path.read_bytes()
    path.write_bytes(data[:2] + bytes([data[2] ^ 1]) + data[3:])
    with pytest.raises(ValueError, match=r"tokens\.bin has changed"):
        corpus.check_tokens(tmp_path)


def test_ranks_that_each_have_all_gradients_count_them_once() -> None:
    assert GradientAccumulator().total_squares(np.array([4.0, 4.0])) == 4


def test_a_log_is_truncated_after_the_step_that_a_run_resumes_from(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "loss": float(step)})
    with log.path.open("a") as file:
        file.write('{"step": 6, "lo')  # a crash
    assert [r["step"] for r in log.read()] == [1, 2, 3, 4, 5]
    log.resume(3)
    assert [r["step"] for r in log.read()] == [1, 2, 3]


def test_evaluations_checkpoints_and_rates_come_when_they_are_due(tmp_path: Path, text: Path) -> None:
    one = trainer(tmp_path / "a", text, steps=7, eval_every=3, save_every=2, keep=100, warmup=2, lr=1e-2, dropout=0.0)
    outcome = one.run()
    records = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    validated = {r["step"]: r["val_loss"] for r in records if "val_loss" in r}
    assert list(validated) == [3, 6, 7]
    kept = {int(p.name.removeprefix("step-")) for p in (tmp_path / "a" / "checkpoints").iterdir()}
    assert {2, 4, 6, 7} <= kept
    assert [r["lr"] for r in records if "loss" in r] == pytest.approx(
        [learning_rate(step, 7, 1e-2, 2, one.options.schedule) for step in range(7)]
    )
    total = n = 0.0
    for batch in one.source.validation():
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            counts = int((targets != -100).sum())
            total += one.model.loss(tokens[None], targets[None]) * counts
            n += counts
    assert validated[7] == pytest.approx(total / n, rel=1e-9) and outcome.validation_loss == validated[7]
    assert outcome.state.best_loss == min(validated.values())
    assert validated[outcome.state.best_step] == outcome.state.best_loss


def test_a_sample_is_drawn_with_the_runs_seed(tmp_path: Path, text: Path) -> None:
    samples = set()
    for seed in (0, 3):
        one = trainer(tmp_path / f"{seed}", text, sample_tokens=30, seed=seed)
        out = one.model.generate([one.source.prompt()], 30, 0.7, top_p=0.9, seed=seed, slide=True)[0]
        assert one.sample() == one.model.tokenizer.decode(out.tolist())
        samples.add(one.sample())
    assert len(samples) == 2


@pytest.mark.parametrize(
    ("step", "last", "improved", "saves"), [(4, 0, 0, 1), (5, 0, 0, 0), (5, 1, 0, 1), (5, 0, 1, 1)]
)
def test_an_evaluation_saves_if_a_checkpoint_is_due_or_it_is_the_best_or_the_last(
    step: int, last: int, improved: int, saves: int
) -> None:
    saved: list[int] = []
    options, state = SimpleNamespace(save_every=2, keep_trajectory=0), SimpleNamespace(step=step)
    one: Any = SimpleNamespace(options=options, state=state, save=lambda: saved.append(step))
    evaluation: Any = SimpleNamespace(last=bool(last), improved=bool(improved))
    Checkpoints().on_evaluation(one, evaluation)
    assert len(saved) == saves
