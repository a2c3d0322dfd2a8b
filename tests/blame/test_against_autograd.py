"""Scores equal autograd through the whole training: clipping, schedule, accumulation, packing, LoRA, both families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blame_runs import LOOP, gpt2_base, labelled_steps, lines, llama_base, lora_options, scores_of, text
from training_oracle import Logits, Params, gpt2, weight_derivatives, zero_key_bias

import onfoot
from llama_oracle import in_float64, in_transformers
from onfoot.blame.run import OpenRun
from onfoot.train import finetune, pretrain
from onfoot.train.options import TrainOptions
from oracles import assert_close


def compare(run: Path, logits: Callable[[OpenRun], Logits], zero: Any = lambda name, g: g) -> None:
    opened, scores, loss, query = scores_of(run)
    start = opened.replay.layout.views(opened.replay.initial.params)
    example = (query.ids[:-1], query.targets)
    expected, their_loss, params, clipped = weight_derivatives(
        logits(opened), start, labelled_steps(opened), example, len(opened.examples), opened.trainer.options, zero
    )
    assert 0 < clipped < opened.last  # both kinds of steps
    assert loss == pytest.approx(their_loss, rel=1e-10)
    final = opened.replay.layout.views(opened.replay.at(opened.last).params)
    for name, value in params.items():
        assert_close(final[name], value, 1e-8, name)
    assert np.abs(scores.totals).max() > 1e-3
    assert_close(scores.totals, -expected, 1e-8, "scores")
    for number, values in scores.tokens.items():
        assert float(values.sum()) == pytest.approx(scores.totals[number], rel=1e-9, abs=1e-12)
        assert sum(score for _, score in scores.by_step[number]) == pytest.approx(float(values.sum()), rel=1e-9)


def test_scores_of_a_gpt2_with_tied_weights_equal_autograd(tmp_path: Path) -> None:
    options = TrainOptions(texts=[str(text(tmp_path))], arch="gpt2", n_layer=2, n_head=2, n_embd=6, context=7, **LOOP)
    pretrain.start(tmp_path / "run", options).run()
    config = onfoot.load(tmp_path / "run").config
    assert config.tie_word_embeddings
    compare(tmp_path / "run", lambda opened: gpt2(config), zero_key_bias(config))


def test_scores_of_a_llama_equal_autograd(tmp_path: Path) -> None:
    base = llama_base(tmp_path)
    options = TrainOptions(texts=[str(text(tmp_path))], init=str(base), context=7, **LOOP | {"clip": 2.5})
    pretrain.start(tmp_path / "run", options).run()
    with in_float64():
        compare(tmp_path / "run", lambda opened: theirs_of(opened, tmp_path))


def theirs_of(opened: OpenRun, path: Path) -> Logits:
    """transformers' LLaMA as a function of its parameters."""
    model = in_transformers(onfoot.load(opened.path, "float64"), path / "theirs")
    return lambda params, tokens: torch.func.functional_call(model, params, (tokens,)).logits


def merged(opened: OpenRun, logits: Logits, transposed: bool) -> Logits:
    """The logits as a function of the LoRA factors: each base weight plus alpha / r times their product."""
    model = opened.trainer.model
    adapter = model.adapters["default"]
    base = {k: torch.tensor(v) for k, v in model.params.items() if k not in model.trainable}

    def function(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        added = {
            f"{layer}.weight": 1.5 * params[adapter.up(layer)] @ params[adapter.down(layer)] for layer in adapter.layers
        }
        return logits(
            {k: v + (added[k] if transposed else added[k].T) if k in added else v for k, v in base.items()}, tokens
        )

    return function


@pytest.mark.parametrize("pack", [True, False])
def test_scores_of_a_lora_run_of_gpt2_equal_autograd(tmp_path: Path, pack: bool) -> None:
    base = gpt2_base(tmp_path)
    finetune.start(tmp_path / "run", lora_options(base, lines(tmp_path), pack=pack, clip=0.47)).run()
    config = onfoot.load(base).config
    compare(tmp_path / "run", lambda opened: merged(opened, gpt2(config), transposed=False))


def test_scores_of_a_lora_run_of_llama_equal_autograd(tmp_path: Path) -> None:
    base = llama_base(tmp_path)
    finetune.start(tmp_path / "run", lora_options(base, lines(tmp_path))).run()
    with in_float64():
        theirs = in_transformers(onfoot.load(base, "float64"), tmp_path / "theirs")

        def logits(params: Params, tokens: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(theirs, params, (tokens,)).logits

        compare(tmp_path / "run", lambda opened: merged(opened, logits, transposed=True))


def test_scores_of_full_fine_tuning_on_packed_lines_equal_autograd(tmp_path: Path) -> None:
    base = gpt2_base(tmp_path)
    finetune.start(tmp_path / "run", lora_options(base, lines(tmp_path), full=True, steps=5)).run()
    config = onfoot.load(base).config
    compare(tmp_path / "run", lambda opened: gpt2(config), zero_key_bias(config))
