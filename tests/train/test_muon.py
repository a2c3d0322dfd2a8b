"""Muon: against the singular value decomposition and PyTorch's own, on every engine, resumed, and in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import onfoot
from llama_oracle import random_config, scrambled_llama
from onfoot.arrays import to_numpy
from onfoot.cli import app
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.memory import Job, plan
from onfoot.models.model import Model
from onfoot.models.params import hidden_matrices
from onfoot.ops.muon import muon_update, newton_schulz
from onfoot.train import finetune, pretrain
from onfoot.train.muon import Muon
from onfoot.train.options import FinetuneOptions, TrainingOptions, TrainOptions
from oracles import assert_close, scrambled

CONFIG = onfoot.GPT2Config(vocab_size=61, n_positions=12, n_embd=15, n_layer=2, n_head=3)
IDS = np.random.default_rng(5).integers(0, 61, (3, 12))


def polynomial(s: np.ndarray) -> np.ndarray:
    """What five iterations make of the singular values of a normalized matrix."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def gpt2(dtype: str = "float64", engine: str = "numpy") -> Model:
    return Model(CONFIG, scrambled(onfoot.create(CONFIG).params, 1, 0.1), dtype, engine)


def llama() -> Model:
    return scrambled_llama(random_config(3, 2, False, "llama", num_hidden_layers=2), 1, engine="numpy")


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 100))
def test_iterations_keep_the_singular_vectors_and_map_the_values(rows: int, columns: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, columns)) * 10.0 ** (seed % 7 - 3)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    expected = (u * polynomial(s / np.sqrt((s**2).sum()))) @ vt
    assert_close(newton_schulz(x), expected, 1e-9)
    assert_close(newton_schulz(x.T), expected.T, 1e-9)
    assert_close(to_numpy(newton_schulz(torch.tensor(x))), expected, 1e-9)


def test_five_iterations_carry_singular_values_near_1() -> None:
    values = polynomial(np.geomspace(0.0015, 1, 100_001))
    assert values.min() > 0.67 and values.max() < 1.21


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not newton_schulz(np.zeros((3, 5))).any()
    p, m = np.ones((3, 5)), np.zeros((3, 5))
    muon_update(p, m, np.zeros((3, 5)), 0.1, 0.95, 0.5)
    assert np.array_equal(p, np.full((3, 5), 0.95))


@pytest.mark.parametrize("exact", [True, False])
def test_updates_are_those_of_pytorchs_muon(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch iterates in bfloat16; with that conversion left out, the same numbers to rounding."""
    if exact:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    rng = np.random.default_rng(2)
    for shape in ((7, 4), (4, 7), (5, 5), (1, 6)):
        p, m = rng.standard_normal(shape), np.zeros(shape)
        theirs = torch.nn.Parameter(torch.tensor(p))
        optimizer = torch.optim.Muon([theirs], lr=0.03, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
        for step in range(6):
            g = rng.standard_normal(shape) * 3.0**step
            theirs.grad = torch.tensor(g)
            optimizer.step()
            muon_update(p, m, g, 0.03, 0.95, 0.2)
        assert_close(p, theirs.detach().numpy(), 1e-10 if exact else 2e-2)
        assert_close(m, optimizer.state[theirs]["momentum_buffer"].numpy(), 1e-12)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_models_steps_are_those_of_pytorchs_muon_and_adamw(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    model = make()
    blocks = hidden_matrices(model.config)
    assert blocks and all(len(model.params[name].shape) == 2 for name in blocks)
    theirs: dict[str, list[torch.nn.Parameter]] = {}
    for name, p in model.params.items():
        parts = [p[:, columns] for columns in blocks[name]] if name in blocks else [p]
        theirs[name] = [torch.nn.Parameter(torch.tensor(part)) for part in parts]
    others = [(one, p.ndim) for name, p in model.params.items() if name not in blocks for one in theirs[name]]
    muon = torch.optim.Muon(
        [one for name in blocks for one in theirs[name]], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [one for one, ndim in others if ndim > 1], "weight_decay": 0.1},
        {"params": [one for one, ndim in others if ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    optimizer = Muon(model, lr=0.02)
    tokens = IDS % model.config.vocab_size
    for step in range(4):
        _, grads = model.loss_and_grads(np.roll(tokens, step, 1))
        for name, g in grads.items():
            parts = [g[:, columns] for columns in blocks[name]] if name in blocks else [g]
            for one, part in zip(theirs[name], parts, strict=True):
                one.grad = 0.5 * torch.tensor(part)
        muon.step()
        adamw.step()
        optimizer.step(grads, scale=0.5)
    for name, p in model.params.items():
        expected = np.concatenate([one.detach().numpy() for one in theirs[name]], axis=-1)
        assert_close(p, expected, 1e-9, name)


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    name = "transformer.h.1.attn.c_attn.weight"
    assert [(s.start, s.stop) for s in hidden_matrices(CONFIG)[name]] == [(0, 15), (15, 30), (30, 45)]
    model = gpt2()
    before = model.params[name].copy()
    _, grads = model.loss_and_grads(IDS)
    Muon(model, lr=1.0, weight_decay=0.0).step(grads)
    for columns in (slice(0, 15), slice(15, 30), slice(30, 45)):
        change = (before - model.params[name])[:, columns]
        assert_close(change / (0.2 * np.sqrt(15)), newton_schulz(grads[name][:, columns]), 1e-9)


def test_a_parameters_own_learning_rate_scales_its_step() -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    before, changes = gpt2().params[name], []
    for lr, scales in ((0.01, {name: 0.5}), (0.005, {})):
        model = gpt2()
        Muon(model, lr=lr, lr_scales=scales).step(model.loss_and_grads(IDS)[1])
        changes.append(model.params[name] - before)
    assert_close(*changes, 1e-12)


@pytest.mark.parametrize(("engine", "dtype", "close"), [("torch", "float64", 1e-9), ("numba", "float32", 2e-3)])
def test_engines_agree(engine: str, dtype: str, close: float) -> None:
    models = gpt2(), gpt2(dtype, engine)
    for model in models:
        optimizer = Muon(model, lr=1e-2)
        for _ in range(3):
            optimizer.train_batch(model, IDS, None, None, None, 1.0)
    for name, p in models[0].params.items():
        assert_close(to_numpy(models[1].params[name]), p, close, name)


def test_the_fused_step_is_the_step_on_all_gradients() -> None:
    fused, whole = gpt2("float32", "auto"), gpt2("float32", "auto")
    first, second = Muon(fused, lr=1e-2), Muon(whole, lr=1e-2)
    for _ in range(3):
        first.train_batch(fused, IDS, None, None, None, 0.0)
        second.step(whole.loss_and_grads(IDS)[1])
    for name, p in whole.params.items():
        assert_close(fused.params[name], p, 1e-5, name)


def test_matrices_have_one_moment_and_saved_ones_must_fit() -> None:
    model = gpt2()
    optimizer = Muon(model)
    blocks = set(hidden_matrices(CONFIG))
    saved = optimizer.moments()
    assert set(saved) == {f"m.{n}" for n in model.params} | {f"v.{n}" for n in set(model.params) - blocks}
    optimizer.restore(saved, 3)
    assert optimizer.steps == 3
    with pytest.raises(ValueError, match="does not belong to a trainable parameter"):
        optimizer.restore(onfoot.AdamW(model).moments(), 3)
    with pytest.raises(ValueError, match="is missing"):
        onfoot.AdamW(model).restore(saved, 3)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_resumed_run_is_bitwise_the_run_that_was_not_interrupted(tmp_path: Path, clip: float) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a rose is a rose is a rose. " * 60)
    options = TrainOptions(
        texts=[str(text)], steps=8, optimizer="muon", n_layer=1, n_head=2, n_embd=16, context=12, batch_size=2,
        clip=clip, eval_every=4, save_every=4, keep=9, sample_tokens=0, quiet=True, layer_decay=0.7, ema=0.9,
    )  # fmt: skip
    whole = pretrain.start(tmp_path / "whole", options)
    whole.run()
    steps = iter(pretrain.start(tmp_path / "half", options))
    for _ in range(5):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    resumed, warnings = pretrain.resume(tmp_path / "half")
    assert resumed.state.step == 5 and not warnings
    resumed.run()
    folders = [tmp_path / run / "checkpoints" / "step-0000008" for run in ("whole", "half")]
    for name in ("model.safetensors", "trainer/weights.safetensors"):
        one, other = (TensorFile(folder / name) for folder in folders)
        assert list(one) == list(other) and all(np.array_equal(one[key], other[key]) for key in one)
    for key, moment in whole.optimizer.moments().items():
        assert np.array_equal(moment, resumed.optimizer.moments()[key]), key


def test_it_learns_and_the_learning_rate_test_knows_it() -> None:
    ids = np.tile(np.arange(30), 40)
    options = TrainingOptions(steps=30, lr=1e-2, optimizer="muon", quiet=True, sample_tokens=0, eval_every=30)
    config = replace(CONFIG, n_embd=18)
    loss = onfoot.Trainer(onfoot.create(config), ids, options).run().validation_loss
    assert loss is not None and loss < 2.0  # 4.1 at the start
    assert isinstance(onfoot.Trainer(onfoot.create(config), ids, options).optimizer, onfoot.Muon)
    found = onfoot.find_lr(onfoot.create(config), ids, options, steps=40)
    assert np.isfinite(found.suggestion)


def test_memory_counts_one_moment_per_matrix_and_the_workspace() -> None:
    job = Job(onfoot.preset("gpt2"), 1, 64)
    adamw, muon = plan(job), plan(replace(job, muon=True))
    assert adamw.moments - muon.moments == 4 * 12 * 12 * 768**2
    assert muon.arena - adamw.arena == 4 * (5 * 3072 * 768 + 3 * 768**2)
    shown = CliRunner().invoke(app, ["info", "gpt2", "--memory", "--tokens", "64", "--optimizer", "muon"])
    assert shown.exit_code == 0 and "Muon's and AdamW's moments" in shown.output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainingOptions(optimizer="sgd"), "unknown optimizer 'sgd'; choose from adamw, muon"),
        (lambda: TrainingOptions(optimizer="muon", shard=True), "cannot be used with --shard"),
        (lambda: TrainingOptions(optimizer="muon", keep_trajectory=1), "cannot replay a run with --optimizer muon"),
        (lambda: FinetuneOptions(model="m", data=["d"], optimizer="muon"), "needs --full"),
        (lambda: Muon(gpt2(), momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_what_does_not_go_together_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_full_fine_tune_uses_it(tmp_path: Path) -> None:
    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=32, n_embd=12, n_layer=1, n_head=2))
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}:", "completion": "{i}"}}\n' for i in range(12)))
    options = FinetuneOptions(
        model=str(tmp_path / "base"),
        data=[str(data)],
        full=True,
        optimizer="muon",
        steps=2,
        quiet=True,
        sample_tokens=0,
    )
    trainer = finetune.start(tmp_path / "run", options)
    trainer.run()
    assert isinstance(trainer.optimizer, Muon) and trainer.optimizer.steps == 2
