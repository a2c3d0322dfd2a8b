"""Frozen parameters, learning rates by layer, and averaged weights: against PyTorch's AdamW, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from llama_oracle import random_config, scrambled_llama
from onfoot.formats.tensors import TensorFile
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.models.model import Model
from onfoot.train import finetune, pretrain
from onfoot.train.averaging import WeightAverage
from onfoot.train.options import FinetuneOptions, TrainingOptions, TrainOptions
from onfoot.train.rates import freeze, lr_scales
from oracles import assert_close, scrambled

CONFIG = onfoot.GPT2Config(vocab_size=257, n_positions=16, n_embd=12, n_layer=3, n_head=3)
IDS = np.random.default_rng(5).integers(0, 257, 600)


def gpt2(dtype: str = "float64", engine: str = "numpy") -> Model:
    model = Model(CONFIG, scrambled(onfoot.create(CONFIG).params, 1, 0.1), dtype, engine)
    model.tokenizer = byte_tokenizer()
    return model


def options(**changes: Any) -> TrainingOptions:
    known = {"steps": 6, "batch_size": 2, "lr": 1e-2, "warmup": 0, "eval_every": 3, "sample_tokens": 0, "quiet": True}
    return TrainingOptions(**{**known, **changes})


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["transformer.wte.weight"], {"transformer.wte.weight"}),
        (["transformer.h.1"], {n for n in gpt2().params if ".h.1." in n}),
        (["*.bias", "*.ln_?.weight"], {n for n in gpt2().params if n.endswith("bias") or ".ln_" in n}),
    ],
)
def test_frozen_parameters_stay_and_the_others_take_the_same_step(patterns: list[str], frozen: set[str]) -> None:
    model, free = gpt2(), gpt2()
    before = {n: p.copy() for n, p in model.params.items()}
    freeze(model, patterns)
    assert set(model.params) - model.trainable == frozen
    for one in (model, free):
        onfoot.Trainer(one, IDS, options(steps=1, clip=0.0)).run()
    for name in model.params:
        expected = before[name] if name in frozen else free.params[name]
        assert_close(model.params[name], expected, 1e-12, name)
        assert (name in frozen) == np.array_equal(model.params[name], before[name])


def test_the_kernels_train_only_what_is_not_frozen() -> None:
    models = gpt2("float32", "numba"), gpt2()
    for model in models:
        freeze(model, ["transformer.wte", "transformer.wpe", "transformer.h.0"])
        onfoot.Trainer(model, IDS, options(steps=3, layer_decay=0.5)).run()
    for name in models[1].params:
        assert_close(models[0].params[name], models[1].params[name], 1e-4, name)
        assert (name in models[0].trainable) == (not np.array_equal(models[0].params[name], start[name]))


start = {n: p.astype(np.float32) for n, p in gpt2().params.items()}


def test_a_pattern_that_matches_nothing_or_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"freeze: no parameter matches 'h\.9'; names are such as"):
        freeze(gpt2(), ["h.9"])
    with pytest.raises(ValueError, match="freeze: \\* leaves no parameter to train"):
        freeze(gpt2(), ["*"])
    with pytest.raises(ValueError, match="--freeze needs --full"):
        FinetuneOptions(model="m", data=["d"], freeze="*.bias")


def group(name: str) -> float:
    """The learning rate's factor of a parameter of GPT-2 with three blocks and a decay of 0.5, counted by hand."""
    table = {"wte": 1 / 8, "wpe": 1 / 8, "0": 1 / 4, "1": 1 / 2, "2": 1.0, "ln_f": 1.0}
    parts = name.split(".")
    return table[parts[2] if parts[1] == "h" else parts[1]]


@pytest.mark.parametrize("clip", [0.0, 0.5])  # fused, and with all gradients first
def test_steps_with_layer_decay_equal_those_of_torch_with_parameter_groups(clip: float) -> None:
    model = gpt2()
    leaves = {n: torch.tensor(p, requires_grad=True) for n, p in model.params.items()}
    groups = [
        {"params": [p], "lr": 1e-2 * group(n), "weight_decay": 0.1 if p.ndim > 1 else 0.0} for n, p in leaves.items()
    ]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-8)
    settings = options(steps=4, layer_decay=0.5, clip=clip, schedule="constant")
    trainer = onfoot.Trainer(model, IDS, settings)
    for step in range(4):
        (batch,) = trainer.source.microbatches(step)
        twin = Model(CONFIG, {n: p.detach().numpy() for n, p in leaves.items()}, "float64", "numpy")
        _, grads = twin.loss_and_grads(batch.tokens, batch.targets)
        for name, p in leaves.items():
            p.grad = torch.tensor(grads[name])
        torch.nn.utils.clip_grad_norm_(leaves.values(), clip or 1e9)
        theirs.step()
    trainer.run()
    for name, p in leaves.items():
        assert_close(model.params[name], p.detach().numpy(), 1e-6, name)  # torch's clipping adds 1e-6 to the norm


def test_llamas_blocks_and_an_untied_head_have_their_rates() -> None:
    model = scrambled_llama(random_config(3, 2, False, "llama", num_hidden_layers=2), 1)
    scales = lr_scales(model, 0.5)
    assert scales["model.embed_tokens.weight"] == 0.25
    assert {s for n, s in scales.items() if ".layers.0." in n} == {0.5}
    assert not [n for n in scales if ".layers.1." in n or n in ("model.norm.weight", "lm_head.weight")]


def test_lora_layers_have_the_rate_of_their_block_and_b_its_own() -> None:
    model = gpt2()
    model.add_lora(r=2, targets=["c_attn.q", "c_fc", "lm_head"], name="3")
    scales = lr_scales(model, 0.5, 16.0)
    assert scales["transformer.h.0.attn.c_attn.q.lora_A.3.weight"] == 0.25
    assert scales["transformer.h.0.mlp.c_fc.lora_B.3.weight"] == 4
    assert scales["lm_head.lora_B.3.weight"] == 16 and "lm_head.lora_A.3.weight" not in scales


def test_lora_plus_moves_b_by_its_multiple() -> None:
    moved = []
    for ratio in (1.0, 8.0):
        model = gpt2()
        model.add_lora(r=2, seed=1)
        before = {n: model.params[n].copy() for n in model.trainable}
        optimizer = onfoot.AdamW(model, lr=1e-3, weight_decay=0.0, lr_scales=lr_scales(model, 1.0, ratio))
        model.train_step(optimizer, IDS[None, :16])
        moved.append({n: model.params[n] - before[n] for n in before})
    for name in moved[0]:
        assert_close(moved[1][name], (8 if ".lora_B." in name else 1) * moved[0][name], 1e-9, name)


def test_the_average_is_the_weighted_mean_of_all_weights_since_the_first_step() -> None:
    model, seen = gpt2(), list[dict[str, np.ndarray]]()

    class Keep(onfoot.Callback):
        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            seen.append({n: p.copy() for n, p in trainer.model.params.items()})

    trainer = onfoot.Trainer(model, IDS, options(ema=0.7), [Keep()])
    trainer.run()
    assert trainer.average is not None
    decayed = 0.7 ** np.arange(5, -1, -1.0)
    for name in model.params:
        mean = sum(w * one[name] for w, one in zip(decayed / decayed.sum(), seen, strict=True))
        assert_close(trainer.average.weights[name], mean, 1e-12, name)
        assert (model.params[name] == seen[-1][name]).all()  # training itself does not see it


def test_the_average_is_what_is_evaluated_and_the_weights_return_unchanged() -> None:
    model = gpt2()
    trainer = onfoot.Trainer(model, IDS, options(ema=0.9, steps=3))
    outcome = trainer.run()
    before = {n: p.copy() for n, p in model.params.items()}
    batches = list(trainer.source.validation())
    n = sum(int((b.targets != -100).sum()) for b in batches)
    raw = sum(model.loss(b.tokens, b.targets, divisor=n) for b in batches)
    with trainer.averaged_weights():
        averaged = sum(model.loss(b.tokens, b.targets, divisor=n) for b in batches)
        with trainer.averaged_weights():  # within one another: still the average
            assert sum(model.loss(b.tokens, b.targets, divisor=n) for b in batches) == averaged
    assert outcome.validation_loss == pytest.approx(averaged, rel=1e-12)
    assert abs(raw - averaged) > 1e-6
    assert all((model.params[name] == before[name]).all() for name in before)
    with pytest.raises(RuntimeError), trainer.averaged_weights():
        raise RuntimeError
    assert all((model.params[name] == before[name]).all() for name in before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


SMALL: dict[str, Any] = {
    "steps": 6, "batch_size": 2, "eval_every": 3, "save_every": 2, "keep": 9, "sample_tokens": 4, "quiet": True,
    "ema": 0.8, "layer_decay": 0.7,
}  # fmt: skip


class Stop(onfoot.Callback):
    def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
        if step.step == 3:
            trainer.stop()


def files(folder: Path, *names: str) -> dict[str, np.ndarray]:
    return {f"{file} {k}": np.array(v) for file in names for k, v in TensorFile(folder / file).items()}


def assert_same_files(one: Path, other: Path, *names: str) -> None:
    expected, got = files(one, *names), files(other, *names)
    assert set(expected) == set(got)
    assert all((expected[k] == got[k]).all() for k in expected)


def test_a_run_with_average_frozen_table_and_layer_decay_resumes_to_bit_identical_files(
    tmp_path: Path, text: Path
) -> None:
    settings = TrainOptions(
        texts=[str(text)],
        arch="gpt2",
        n_layer=2,
        n_embd=16,
        n_head=2,
        context=16,
        freeze="transformer.wpe,*.bias",
        **SMALL,
    )
    pretrain.start(tmp_path / "whole", settings).run()
    cut = pretrain.start(tmp_path / "cut", settings)
    cut.callbacks.append(Stop())
    cut.run()
    resumed, warnings = pretrain.resume(tmp_path / "cut")
    assert resumed.state.step == 3 and warnings == [] and not [n for n in resumed.model.trainable if "bias" in n]
    resumed.run()
    names = "model.safetensors", "trainer/weights.safetensors", "trainer/optimizer.safetensors"
    assert_same_files(tmp_path / "whole" / "last", tmp_path / "cut" / "last", *names)
    assert resumed.average is not None
    saved = onfoot.load(tmp_path / "cut" / "checkpoints" / "step-0000006")
    for name in resumed.model.trainable:  # the model that is saved is the average, not what trains
        assert (saved.params[name] == resumed.average.weights[name]).all()
        assert not (saved.params[name] == resumed.model.params[name]).all()


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_a_fine_tune_with_average_resumes_to_bit_identical_files(tmp_path: Path, full: bool) -> None:
    model = gpt2("float32", "numba")
    model.save(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(20)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = {"freeze": "transformer.h.0"} if full else {"r": 2, "lora_plus": 4.0}
    base = str(tmp_path / "base")
    settings = FinetuneOptions(model=base, data=[str(data)], full=full, lr=1e-2, warmup=1, **SMALL, **more)
    finetune.start(tmp_path / "whole", settings).run()
    cut = finetune.start(tmp_path / "cut", settings)
    cut.callbacks.append(Stop())
    cut.run()
    finetune.resume(tmp_path / "cut")[0].run()
    weights = "model.safetensors" if full else "adapter_model.safetensors"
    names = weights, "trainer/weights.safetensors", "trainer/optimizer.safetensors"
    assert_same_files(tmp_path / "whole" / "last", tmp_path / "cut" / "last", *names)


def test_weights_of_another_run_are_refused() -> None:
    average = WeightAverage(gpt2(), 0.9)
    raw = average.raw()
    with pytest.raises(ValueError, match="do not match the parameters of this run"):
        average.restore({**raw, "transformer.wte.weight": raw["transformer.wte.weight"][1:]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_decay": 0.0}, r"layer_decay must be in \(0, 1\], got 0.0"),
        ({"layer_decay": 1.1}, r"layer_decay must be in \(0, 1\], got 1.1"),
        ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
        ({"ema": 0.9, "keep_trajectory": 3}, "cannot replay a run with --ema"),
        ({"layer_decay": 0.9, "keep_trajectory": 3}, "cannot replay a run with --layer-decay"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingOptions(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_plus": 0.0}, "lora_plus must be > 0, got 0.0"),
        ({"lora_plus": 4.0, "full": True}, "--lora-plus is for LoRA layers"),
        ({"lora_plus": 4.0, "keep_trajectory": 3}, "cannot replay a run with --lora-plus"),
    ],
)
def test_bad_values_of_a_fine_tune_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FinetuneOptions(model="m", data=["d"], **changes)
