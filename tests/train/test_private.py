"""Private training: clipping per example, noise, Poisson sampling, the accountant, and runs that resume."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.models.inputs import no_step
from onfoot.models.model import Model
from onfoot.recording import pool
from onfoot.train import finetune, pretrain, private_step
from onfoot.train.log import Log, picture
from onfoot.train.optimizer import AdamW
from onfoot.train.options import FinetuneOptions, TrainOptions
from onfoot.train.privacy import Accountant, Privacy, noise_for, plan
from onfoot.train.private_step import Settings, add_noise, clip_weights, clipped_gradients
from onfoot.train.step import Microbatch, accumulated_step
from oracles import assert_close, scrambled

Grads = dict[str, np.ndarray]


def small(dtype: str = "float64", scale: float = 0.3, **changes: Any) -> Model:
    sizes = {"vocab_size": 41, "n_positions": 12, "n_embd": 12, "n_layer": 2, "n_head": 3} | changes
    config = onfoot.GPT2Config(**sizes)
    return Model(config, scrambled(onfoot.create(config).params, 2, scale), dtype)


def some_batches(seed: int, packed: bool = True) -> list[Microbatch]:
    """Two microbatches of different sizes, with padding and targets of −100."""
    rng = np.random.default_rng(seed)
    made = []
    for b, t in ((3, 12), (2, 9)):
        tokens, targets = rng.integers(0, 41, (2, b, t))
        targets[rng.random((b, t)) < 0.4] = -100
        targets[:, 0], targets[:, -2:] = 5, -100
        segments = np.sort(rng.integers(0, 3, (b, t)), axis=1) if packed else None
        made.append(Microbatch(tokens, targets, segments))
    return made


def alone(batches: list[Microbatch]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every example with a target, as a batch of its own."""
    found = []
    for tokens, targets, segments, _ in batches:
        numbers = np.zeros_like(tokens) if segments is None else segments
        for b in range(len(tokens)):
            for k in np.unique(numbers[b]):
                own = numbers[b] == k
                found.append((tokens[b][own][None], targets[b][own][None]))
    return [one for one in found if (one[1] != -100).any()]


def mean_gradients(model: Model, batches: list[Microbatch]) -> list[Grads]:
    """The gradient of every example's mean loss, one by one."""
    return [model.loss_and_grads(*one)[1] for one in alone(batches)]


def norm(grads: Grads) -> float:
    return float(np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values())))


# Clipping


def expected_sum(model: Model, batches: list[Microbatch], clip: float, divisor: float) -> Grads:
    total: Grads = {}
    for grads in mean_gradients(model, batches):
        weight = min(1.0, clip / norm(grads)) / divisor
        total = {name: total.get(name, 0) + weight * g for name, g in grads.items()}
    return total


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("clip", [0.05, 4.0, 1e6])
def test_the_sum_is_that_of_the_clipped_mean_gradients(packed: bool, clip: float) -> None:
    model, batches = small(), some_batches(1, packed)
    grads, loss, clipped = clipped_gradients(model, batches, clip, 7.0, no_step)
    for name, expected in expected_sum(model, batches, clip, 7.0).items():
        assert_close(grads[name], expected, 2e-5, name)  # the margin for rounding is 1e-5
    norms = np.array([norm(g) for g in mean_gradients(model, batches)])
    assert clipped == pytest.approx((norms > clip).mean())
    targets = [(one[1] != -100).sum() for one in alone(batches)]
    losses = [model.loss(*one) for one in alone(batches)]
    assert loss == pytest.approx(np.average(losses, weights=targets))


def test_a_step_clips_some_examples_and_not_others() -> None:
    model, batches = small(), some_batches(1)
    norms = [norm(g) for g in mean_gradients(model, batches)]
    clipped = clipped_gradients(model, batches, 4.0, 7.0, no_step)[2]
    assert min(norms) < 4.0 < max(norms) and 0 < clipped < 1


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    clip=st.floats(1e-3, 1e3),
    scale=st.sampled_from([0.1, 0.5, 3.0]),
    dtype=st.sampled_from(["float64", "float32"]),
)
def test_no_example_contributes_more_than_the_clipping_norm(seed: int, clip: float, scale: float, dtype: str) -> None:
    model = small(dtype, scale)
    batch = some_batches(seed)[0]
    counts = [(one[1] != -100).sum() for one in alone([batch])]
    each = model.example_grads(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments)
    squares = sum((np.asarray(g, np.float64).reshape(len(g), -1) ** 2).sum(axis=1) for g in each.values())
    norms = model.example_norms(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments)
    n_targets = np.zeros(norms.size, int)
    n_targets[norms > 0] = counts
    contributions = clip_weights(norms, n_targets, clip) * np.sqrt(squares)
    assert contributions.max() <= clip * (1 + 1e-6)
    one_by_one = np.array([norm(g) for g in mean_gradients(model, [batch])])
    assert_close(contributions[norms > 0], np.minimum(one_by_one, clip), 1e-3)


def test_an_example_with_a_huge_gradient_moves_the_sum_by_no_more_than_its_share() -> None:
    model, (batch, _) = small(), some_batches(3, packed=False)
    model.params["transformer.wpe.weight"][:] *= 1e-3
    huge = model.params["transformer.wte.weight"].copy()
    huge[40] *= 1e5  # logits of that token, and their gradients, are enormous
    model.params["transformer.wte.weight"] = huge
    tokens = np.where(batch.tokens == 40, 0, batch.tokens)
    targets = np.where(batch.targets == 40, 0, batch.targets)
    targets[0, 0] = 40
    tokens[0, 0] = 40
    norms = [norm(g) for g in mean_gradients(model, [Microbatch(tokens, targets)])]
    assert max(norms) > 1e3
    clip, divisor = 0.5, 4.0
    with_it = clipped_gradients(model, [Microbatch(tokens, targets)], clip, divisor, no_step)[0]
    without = clipped_gradients(model, [Microbatch(tokens[1:], targets[1:])], clip, divisor, no_step)[0]
    assert norm({name: with_it[name] - without[name] for name in with_it}) <= clip / divisor * (1 + 1e-6)
    assert norm(with_it) <= 3 * clip / divisor


def _no_mean(norms: np.ndarray, n_targets: np.ndarray, clip: float) -> np.ndarray:
    return np.minimum(1.0, clip / np.maximum(norms, 1e-300))


def _all_alike(norms: np.ndarray, n_targets: np.ndarray, clip: float) -> np.ndarray:
    total = np.sqrt((norms**2).sum())
    return np.full(norms.size, min(1.0, clip / total))


@pytest.mark.parametrize("wrong", [_no_mean, _all_alike])
def test_planted_bugs_in_clipping_are_caught(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    model, batches = small(), some_batches(1)
    expected = expected_sum(model, batches, 4.0, 7.0)["transformer.wte.weight"]
    monkeypatch.setattr(private_step, "clip_weights", wrong)
    grads = clipped_gradients(model, batches, 4.0, 7.0, no_step)[0]["transformer.wte.weight"]
    assert np.linalg.norm(grads - expected) > 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_without_clipping_and_noise_the_step_is_the_ordinary_one_bit_for_bit(dtype: str) -> None:
    batches = some_batches(4)
    n_targets = sum(int((b.targets != -100).sum()) for b in batches)
    one, other = small(dtype), small(dtype)
    first, second = AdamW(one, lr=1e-2), AdamW(other, lr=1e-2)
    for step in range(3):
        result = private_step.private_step(one, first, batches, 1e-2, Settings(math.inf, 0.0, 5, 0, step), no_step)
        ordinary = accumulated_step(other, second, batches, n_targets, 1e-2, 0.0, no_step)
        assert (result.loss, result.norm) == ordinary
    for name in one.params:
        assert (one.params[name] == other.params[name]).all(), name


def test_with_a_clipping_norm_that_nothing_reaches_the_gradient_is_the_ordinary_one() -> None:
    model = small()
    tokens = np.random.default_rng(0).integers(0, 41, (4, 12))
    targets = np.random.default_rng(1).integers(0, 41, (4, 12))  # as many per row
    grads = clipped_gradients(model, [Microbatch(tokens, targets)], 1e9, 4, no_step)[0]
    for name, expected in model.loss_and_grads(tokens, targets)[1].items():
        assert_close(grads[name], expected, 1e-12, name)


def test_a_gradient_that_is_not_finite_stops_the_step() -> None:
    model, batches = small(), some_batches(1)
    model.params["transformer.ln_f.weight"][:] = np.inf
    before = {name: value.copy() for name, value in model.params.items()}
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="gradient of an example is not finite"):
        private_step.private_step(model, AdamW(model), batches, 1e-3, Settings(1.0, 1.0, 4, 0, 0), no_step)
    assert all((model.params[name] == before[name]).all() for name in before)


# Noise


def noise(model: Model, seed: int, step: int, deviation: float = 1.0) -> Grads:
    grads = {name: np.zeros_like(model.params[name]) for name in model.trainable}
    add_noise(model, grads, deviation, seed, step)
    return grads


def test_noise_has_its_deviation_and_differs_by_parameter_step_and_seed() -> None:
    model = small(n_embd=48)
    table, other = "transformer.wte.weight", "transformer.wpe.weight"
    drawn = noise(model, 1, 2, deviation=3.0)
    values = np.concatenate([g.reshape(-1) for g in drawn.values()])  # about 60,000
    assert values.std() == pytest.approx(3.0, rel=0.02) and abs(values.mean()) < 0.06
    assert np.unique(values).size == values.size
    for again in (noise(model, 1, 3), noise(model, 2, 2)):
        assert abs(np.corrcoef(again[table].reshape(-1), drawn[table].reshape(-1))[0, 1]) < 0.1
    n = drawn[other].size
    assert abs(np.corrcoef(drawn[table].reshape(-1)[:n], drawn[other].reshape(-1))[0, 1]) < 0.15


def test_noise_is_the_same_for_any_number_of_threads() -> None:
    model = small("float32", n_embd=48)
    before = pool.threads()
    try:
        pool.set_threads(1)
        one = noise(model, 1, 2)
    finally:
        pool.set_threads(before)
    two = noise(model, 1, 2)
    assert all((one[name] == two[name]).all() for name in one)


def test_the_noise_of_a_step_is_the_multiplier_times_the_clipping_norm_over_the_batch_size() -> None:
    model = small(n_embd=48)
    optimizer = AdamW(model, lr=0.0, betas=(0.0, 0.0))
    result = private_step.private_step(model, optimizer, [], None, Settings(0.5, 8.0, 4, 1, 0), no_step)
    values = np.concatenate([m.reshape(-1) for m in optimizer.m.values()])  # β₁ = 0: the gradient itself
    assert values.std() == pytest.approx(8.0 * 0.5 / 4, rel=0.02)
    assert math.isnan(result.loss) and result.norm == pytest.approx(np.linalg.norm(values))


# Sampling


def test_each_example_is_sampled_with_the_same_probability_and_independently() -> None:
    privacy = Privacy(n_examples=200, expected=30, clip=1.0, noise=1.0, delta=1e-5, steps=10, seed=3)
    samples = [privacy.sample(step) for step in range(2000)]
    sizes = np.array([s.size for s in samples])
    assert sizes.mean() == pytest.approx(30, rel=0.02)
    assert sizes.var() == pytest.approx(200 * 0.15 * 0.85, rel=0.15)  # of a binomial, not constant
    counts = np.bincount(np.concatenate(samples), minlength=200)
    assert counts.min() > 200 and counts.max() < 400  # 300 on average, with a deviation of 16
    assert (privacy.sample(7) == samples[7]).all()


def test_sources_give_the_examples_that_are_asked_for(tmp_path: Path, base: Path, data: Path) -> None:
    source = finetune.start(tmp_path / "run", sft(base, data)).source
    batches = source.batches_of(np.array([3, 11, 4, 0, 7]))
    found = [tuple(one[0][0]) for one in alone([Microbatch(*b) for b in batches])]
    asked = [tuple(source.train.examples[i].tokens) for i in (3, 11, 4, 0, 7)]
    assert sorted(found) == sorted(asked)
    assert source.n_examples == 18 and all(len(b.tokens) <= 2 for b in batches)


# The accountant


@pytest.mark.parametrize(
    ("rate", "sigma", "steps", "delta"), [(0.01, 1.1, 1000, 1e-5), (0.3, 4.0, 50, 1e-6), (1.0, 10.0, 20, 1e-5)]
)
def test_epsilon_is_the_figure_of_the_accountant(rate: float, sigma: float, steps: int, delta: float) -> None:
    theirs = RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)
    assert Accountant(rate, sigma, delta).epsilon(steps) == pytest.approx(theirs.get_epsilon(delta), rel=1e-12)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [(0.01, 1.1, 1000, 1e-5), (0.1, 2.0, 200, 1e-6)])
def test_epsilon_is_that_of_the_published_formula(rate: float, sigma: float, steps: int, delta: float) -> None:
    """Mironov, Talwar and Zhang (2019), integer orders; converted as by Canonne, Kamath and Steinke (2020)."""
    bounds = []
    for alpha in range(2, 40):
        terms = [
            math.comb(alpha, k) * (1 - rate) ** (alpha - k) * rate**k * math.exp((k * k - k) / (2 * sigma**2))
            for k in range(alpha + 1)
        ]
        divergence = steps * math.log(math.fsum(terms)) / (alpha - 1)
        bounds.append(divergence + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1))
    found = Accountant(rate, sigma, delta).epsilon(steps)
    assert 0.97 * min(bounds) < found <= min(bounds) * (1 + 1e-9)  # orders that are not integers may be better


@pytest.mark.parametrize("epsilon", [0.3, 3.0, 40.0])
def test_the_noise_for_an_epsilon_reaches_it_and_hardly_more(epsilon: float) -> None:
    sigma = noise_for(epsilon, 1e-5, 0.05, 300)
    assert Accountant(0.05, sigma, 1e-5).epsilon(300) <= epsilon
    assert Accountant(0.05, sigma * 0.999, 1e-5).epsilon(300) > epsilon


def test_epsilon_grows_with_every_step_and_is_infinite_without_noise() -> None:
    private = Privacy(1000, 50, 1.0, 1.2, 1e-5, 100, 0)
    spent = [private.epsilon(step) for step in (0, 1, 2, 10, 100)]
    assert spent[0] == 0 and spent == sorted(set(spent))
    assert f"ε = {spent[-1]:.4g}, δ = 1e-05 after 100 steps" in private.report()
    clipped = Privacy(1000, 50, 1.0, 0.0, None, 100, 0)
    assert clipped.epsilon(1) == math.inf and "no privacy guarantee (ε = ∞" in clipped.report()


def test_an_epsilon_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dp_epsilon=1e-09 cannot be reached in 1,000 steps .* larger --dp-epsilon"):
        noise_for(1e-9, 1e-12, 1.0, 1000)


def test_the_accountant_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert Accountant(0.2, 1.0, 1e-4).epsilon(100) > 0  # some of its orders do not converge
    assert capfd.readouterr() == ("", "")


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=r'needs dp-accounting: pip install "onfoot\[dp\]"'):
        Accountant(0.1, 1.0, 1e-5)


# Options


PRIVATE: dict[str, Any] = {"dp_clip": 0.5, "dp_noise": 0.7, "dp_delta": 1e-4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_clip": None}, "dp_delta needs --dp-clip"),
        ({"dp_clip": 0.0}, "dp_clip must be > 0, got 0"),
        ({"dp_clip": -1.0}, "dp_clip must be > 0"),
        ({"dp_clip": math.inf}, "dp_clip must be finite"),
        ({"dp_noise": None}, "either --dp-epsilon or --dp-noise, got neither"),
        ({"dp_epsilon": 3.0}, "either --dp-epsilon or --dp-noise, got both"),
        ({"dp_noise": None, "dp_epsilon": 0.0}, "dp_epsilon must be > 0, got 0"),
        ({"dp_noise": None, "dp_epsilon": -2.0}, "dp_epsilon must be > 0"),
        ({"dp_noise": -0.1}, "dp_noise must be >= 0"),
        ({"dp_delta": None}, "needs --dp-delta"),
        ({"dp_delta": 0.0}, r"dp_delta must be in \(0, 1\)"),
        ({"dp_delta": 1.0}, r"dp_delta must be in \(0, 1\)"),
        ({"shard": True}, "--shard under mpiexec"),
        ({"tokenizer": "bpe"}, "made from the private text"),
        ({"dp_clip": "1"}, "dp_clip must be a number"),
    ],
)
def test_options_that_give_no_guarantee_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**{**PRIVATE, **changes})


def test_runs_that_give_no_guarantee_are_refused() -> None:
    options = TrainOptions(batch_size=4, accumulate=2, **PRIVATE)
    assert plan(options, 9000, 1).rate == 8 / 9000
    with pytest.raises(ValueError, match="got 2 MPI ranks"):
        plan(options, 9000, 2)
    with pytest.raises(ValueError, match=r"batch_size × accumulate = 8 exceeds the 7 training examples"):
        plan(options, 7, 1)
    with pytest.raises(ValueError, match=r"dp_delta=0\.0001 is not below 1/10,000.* pass --dp-delta 1e-05 or less"):
        plan(options, 10_000, 1)
    assert plan(TrainOptions(dp_clip=1.0, dp_noise=0), 50, 1).epsilon(1) == math.inf  # no δ is needed


# Runs


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog while the cat looks on. " * 60)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(
        vocab_size=tokenizer.size, n_positions=48, n_embd=16, n_layer=2, n_head=2,
        bos_token_id=tokenizer.eos_id, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    model = onfoot.create(config, seed=1)
    model.tokenizer = tokenizer
    model.save(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{i} and one:", "completion": f" {i + 1}"} for i in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sft(base: Path, data: Path, **changes: Any) -> FinetuneOptions:
    settings = {
        "steps": 8, "batch_size": 2, "accumulate": 2, "r": 2, "lr": 1e-2, "warmup": 2, "eval_every": 4,
        "save_every": 2, "keep": 9, "sample_tokens": 0, "lora_dropout": 0.2, **PRIVATE, "dp_delta": 1e-3,
    }  # fmt: skip
    return FinetuneOptions(model=str(base), data=[str(data)], **{**settings, **changes})


def pretraining(text: Path, **changes: Any) -> TrainOptions:
    settings = {
        "n_layer": 1, "n_head": 2, "n_embd": 16, "context": 16, "batch_size": 2, "steps": 8, "warmup": 2,
        "eval_every": 4, "save_every": 2, "eval_windows": 4, "keep": 10, "sample_tokens": 0, "dropout": 0.1, **PRIVATE,
    }  # fmt: skip
    return TrainOptions(texts=[str(text)], **{**settings, **changes})


def cut_and_resume(module: Any, run: Path, settings: Any, at: int) -> None:
    """A run that is interrupted in a step, and resumed from the checkpoint before it."""
    cut = module.start(run, settings)
    step = cut.step

    def stopping(lr: float) -> Any:
        if cut.state.step == at:
            raise KeyboardInterrupt
        return step(lr)

    cut.step = stopping
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    resumed, complaints = module.resume(run)
    assert complaints == [] and resumed.state.step == at - at % 2
    resumed.run()


@pytest.mark.parametrize("which", ["pretraining", "LoRA", "full"])
def test_a_private_run_resumes_to_bit_identical_weights(
    tmp_path: Path, text: Path, base: Path, data: Path, which: str
) -> None:
    module: Any = pretrain if which == "pretraining" else finetune
    settings: Any = {
        "pretraining": lambda: pretraining(text),
        "LoRA": lambda: sft(base, data),
        "full": lambda: sft(base, data, full=True, lora_dropout=0.0),
    }[which]()
    module.start(tmp_path / "whole", settings).run()
    cut_and_resume(module, tmp_path / "cut", settings, 5)
    name = "adapter_model.safetensors" if which == "LoRA" else "model.safetensors"
    one, other = (TensorFile(tmp_path / run / "last" / name) for run in ("whole", "cut"))
    assert set(one) == set(other)
    assert all((np.array(one[k]) == np.array(other[k])).all() for k in one)
    logs = [Log(tmp_path / run / "log.jsonl").read() for run in ("whole", "cut")]
    spent = [[r["epsilon"] for r in log if "epsilon" in r] for log in logs]
    assert spent[0] == spent[1] == sorted(set(spent[0])) and len(spent[0]) == 8


def test_the_log_has_the_epsilon_of_the_accountant(tmp_path: Path, text: Path) -> None:
    trainer = pretrain.start(tmp_path / "run", pretraining(text))
    trainer.run()
    last = [r for r in Log(tmp_path / "run" / "log.jsonl").read() if "epsilon" in r][-1]
    theirs = RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(2 / trainer.source.n_examples, dp_accounting.GaussianDpEvent(0.7))
    theirs.compose(event, 8)
    assert last["epsilon"] == pytest.approx(theirs.get_epsilon(1e-4), rel=1e-9)
    assert 0 <= last["clipped"] <= 1


def test_a_step_without_examples_adds_noise_and_has_no_loss(tmp_path: Path, text: Path) -> None:
    trainer = pretrain.start(tmp_path / "run", pretraining(text, batch_size=1, steps=12))
    assert trainer.privacy is not None
    empty = [step + 1 for step in range(12) if trainer.privacy.sample(step).size == 0]
    assert 0 < len(empty) < 12
    assert not trainer.run().interrupted
    records = [r for r in Log(tmp_path / "run" / "log.jsonl").read() if "loss" in r]
    assert [r["step"] for r in records if r["loss"] is None] == empty
    assert picture(records).startswith(b"\x89PNG")
    assert all(math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in records)


def test_epochs_count_examples_not_rows(tmp_path: Path, base: Path, data: Path) -> None:
    trainer = finetune.start(tmp_path / "run", sft(base, data, steps=0, epochs=2.0))
    assert trainer.options.steps == 9 and trainer.source.rows < 18  # 18 examples, twice, 4 per step


def test_clipping_alone_trains_and_says_that_nothing_is_guaranteed(tmp_path: Path, text: Path) -> None:
    arguments = ["--n-layer", "1", "--n-embd", "16", "--n-head", "2", "--context", "16", "--steps", "3"]
    arguments += ["--batch-size", "4", "--eval-windows", "4", "--sample-tokens", "0", "--dp-clip", "0.1"]
    run = tmp_path / "run"
    shown = CliRunner().invoke(app, ["train", str(text), "--out", str(run), *arguments, "--dp-noise", "0"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("no privacy guarantee (ε = ∞, no noise)") == 2 and "ε inf" in shown.output
    assert all(r["epsilon"] is None for r in Log(run / "log.jsonl").read() if "epsilon" in r)
    refused = CliRunner().invoke(app, ["train", str(text), *arguments, "--dp-noise", "0", "--clip", "1"])
    assert refused.exit_code == 2 and "--dp-clip cannot be used with --clip" in refused.output


@pytest.mark.slow
def test_the_command_finds_the_noise_draws_a_secret_seed_and_shows_the_epsilon(
    tmp_path: Path, base: Path, data: Path
) -> None:
    arguments = [
        "finetune",
        str(base),
        "--data",
        str(data),
        "--steps",
        "4",
        "--batch-size",
        "3",
        "--sample-tokens",
        "0",
    ]
    arguments += ["--dp-epsilon", "5", "--dp-delta", "0.01", "--dp-clip", "1"]
    seeds = []
    for name in ("one", "two"):
        shown = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / name)])
        assert shown.exit_code == 0, shown.output
        assert shown.output.count("differential privacy: ε = 5, δ = 0.01") == 2
        assert "for the weights, and for each training example" in shown.output
        seeds.append(json.loads((tmp_path / name / "run.json").read_text())["seed"])
    assert len({0, *seeds}) == 3
    shown = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "three"), "--seed", "7"])
    assert json.loads((tmp_path / "three" / "run.json").read_text())["seed"] == 7, shown.output
