"""Scores equal autograd through the whole training: clipping, warmup, accumulation, decay, packing, LoRA, both families."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_oracle import Logits, Params, examples_of, gpt2, weight_derivatives, zero_key_bias

import onfoot
from llama_oracle import in_float64, in_transformers, scrambled_llama
from onfoot.blame.query import encode_query
from onfoot.blame.run import OpenRun, open_run
from onfoot.blame.scores import Scores, replay_backwards
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import finetune, pretrain
from onfoot.train.options import FinetuneOptions, TrainOptions
from oracles import assert_close, scrambled

LOOP: dict[str, Any] = {
    "steps": 7, "batch_size": 2, "accumulate": 2, "lr": 0.02, "warmup": 3, "betas": (0.8, 0.9), "weight_decay": 0.3,
    "clip": 1.35, "eval_every": 7, "save_every": 7, "eval_windows": 2, "sample_tokens": 0, "dtype": "float64",
    "engine": "numpy", "seed": 3,
}  # fmt: skip
QUERY = {"prompt": "ab", "completion": "cade"}


def text(path: Path) -> Path:
    letters = np.random.default_rng(5).choice(list("abcde \n"), 140)
    (path / "text.txt").write_text("".join(letters))
    return path / "text.txt"


def lines(path: Path) -> Path:
    rng = np.random.default_rng(6)
    words = ["".join(rng.choice(list("abcde"), n)) for n in rng.integers(1, 5, 26)]
    data = [{"prompt": a, "completion": b} for a, b in zip(words[::2], words[1::2], strict=True)]
    (path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in data))
    return path / "data.jsonl"


def gpt2_base(path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(vocab_size=tokenizer.size, n_positions=12, n_embd=6, n_layer=2, n_head=2)
    model = onfoot.Model(config, scrambled(onfoot.create(config).params, 2, 0.2), "float64", "numpy")
    model.tokenizer = tokenizer
    model.save(path / "base")
    return path / "base"


def llama_base(path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = onfoot.LlamaConfig(
        vocab_size=tokenizer.size, hidden_size=8, intermediate_size=7, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=12, tie_word_embeddings=False,
    )  # fmt: skip
    model = scrambled_llama(config, 3, engine="numpy")
    model.tokenizer = tokenizer
    model.save(path / "base")
    return path / "base"


def scores_of(run: Path, memory: int | None = None) -> tuple[OpenRun, Scores, float, Any]:
    """The run, the scores of its examples, the query's loss at its end, and the query."""
    opened = open_run(run, "last", memory=memory)
    replay = opened.replay
    query = encode_query(opened.trainer, QUERY)
    replay.put_params(replay.at(opened.last).params)
    loss, gradient = query.loss_and_gradient(opened.trainer.model)
    steps = replay.backwards(replay.plan(opened.last))
    (scores,) = replay_backwards(replay, steps, [gradient], len(opened.examples))
    return opened, scores, loss, query


def labelled_steps(opened: OpenRun) -> list[list[tuple[int, np.ndarray, np.ndarray]]]:
    """The examples of each step; their numbers are found by their contents, which differ from example to example."""
    examples = [opened.examples.ids(i) for i in range(len(opened.examples))]
    numbers = {(tuple(ids[:-1]), tuple(ids[1:])): i for i, ids in enumerate(examples)}
    assert len(numbers) == len(examples)
    found = []
    for step in range(opened.last):
        batches = opened.trainer.source.microbatches(step)
        each = [one for batch in batches for one in examples_of(batch)]
        shifted = [(tuple(tokens), (*tokens[1:], targets[-1])) for tokens, targets in each]
        found.append([(numbers[key], *one) for key, one in zip(shifted, each, strict=True)])
    return found


def compare(run: Path, logits: Callable[[OpenRun], Logits], zero: Any = lambda name, g: g) -> None:
    opened, scores, loss, query = scores_of(run)
    start = opened.replay.initial.params
    example = (query.ids[:-1], query.targets)
    expected, their_loss, params, clipped = weight_derivatives(
        logits(opened), start, labelled_steps(opened), example, len(opened.examples), opened.trainer.options, zero
    )
    assert 0 < clipped < opened.last  # both kinds of steps
    assert loss == pytest.approx(their_loss, rel=1e-10)
    final = opened.replay.at(opened.last).params
    for name, value in params.items():
        assert_close(final[name], value, 1e-8, name)
    assert np.abs(scores.totals).max() > 1e-3
    assert_close(scores.totals, -expected, 1e-8, "scores")
    for number, values in scores.tokens.items():
        assert float(values.sum()) == pytest.approx(scores.totals[number], rel=1e-9, abs=1e-12)
        assert sum(score for _, score in scores.by_step[number]) == pytest.approx(float(values.sum()), rel=1e-9)


def test_scores_of_a_gpt2_with_tied_weights_equal_autograd(tmp_path: Path) -> None:
    options = TrainOptions(texts=[str(text(tmp_path))], n_layer=2, n_head=2, n_embd=6, context=7, **LOOP)
    pretrain.start(tmp_path / "run", options).train()
    config = onfoot.load(tmp_path / "run").config
    assert config.tie_word_embeddings
    compare(tmp_path / "run", lambda opened: gpt2(config), zero_key_bias(config))


def test_scores_of_a_llama_equal_autograd(tmp_path: Path) -> None:
    base = llama_base(tmp_path)
    options = TrainOptions(texts=[str(text(tmp_path))], init=str(base), context=7, **LOOP | {"clip": 2.5})
    pretrain.start(tmp_path / "run", options).train()
    with in_float64():
        compare(tmp_path / "run", lambda opened: theirs_of(opened, tmp_path))


def theirs_of(opened: OpenRun, path: Path) -> Logits:
    """transformers' LLaMA as a function of its parameters."""
    model = in_transformers(onfoot.load(opened.path, "float64"), path / "theirs")
    return lambda params, tokens: torch.func.functional_call(model, params, (tokens,)).logits


def lora_options(base: Path, data: Path, **changes: Any) -> FinetuneOptions:
    return FinetuneOptions(model=str(base), data=[str(data)], r=2, alpha=3.0, **LOOP | changes)


def merged(opened: OpenRun, logits: Logits, transposed: bool) -> Logits:
    """The logits as a function of the LoRA factors: each base weight plus alpha / r times their product."""
    model = opened.trainer.model
    adapter = model.adapters["default"]
    base = {k: torch.tensor(v) for k, v in model.params.items() if k not in model.trainable}

    def function(params: Params, tokens: torch.Tensor) -> torch.Tensor:
        added = {
            f"{layer}.weight": 1.5 * params[adapter.up(layer)] @ params[adapter.down(layer)] for layer in adapter.layers
        }
        return logits({k: v + (added[k] if transposed else added[k].T) if k in added else v for k, v in base.items()}, tokens)

    return function


@pytest.mark.parametrize("pack", [True, False])
def test_scores_of_a_lora_run_of_gpt2_equal_autograd(tmp_path: Path, pack: bool) -> None:
    base = gpt2_base(tmp_path)
    finetune.start(tmp_path / "run", lora_options(base, lines(tmp_path), pack=pack, clip=0.47)).train()
    config = onfoot.load(base).config
    compare(tmp_path / "run", lambda opened: merged(opened, gpt2(config), transposed=False))


def test_scores_of_a_lora_run_of_llama_equal_autograd(tmp_path: Path) -> None:
    base = llama_base(tmp_path)
    finetune.start(tmp_path / "run", lora_options(base, lines(tmp_path))).train()
    with in_float64():
        theirs = in_transformers(onfoot.load(base, "float64"), tmp_path / "theirs")

        def logits(params: Params, tokens: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(theirs, params, (tokens,)).logits

        compare(tmp_path / "run", lambda opened: merged(opened, logits, transposed=True))


def test_scores_of_full_fine_tuning_on_packed_lines_equal_autograd(tmp_path: Path) -> None:
    base = gpt2_base(tmp_path)
    finetune.start(tmp_path / "run", lora_options(base, lines(tmp_path), full=True, steps=5)).train()
    config = onfoot.load(base).config
    compare(tmp_path / "run", lambda opened: gpt2(config), zero_key_bias(config))
