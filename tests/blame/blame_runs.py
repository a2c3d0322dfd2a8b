"""Tiny runs in float64, and the scores of their examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from training_oracle import examples_of

import onfoot
from llama_oracle import scrambled_llama
from onfoot.blame.query import encode_query
from onfoot.blame.run import OpenRun, open_run
from onfoot.blame.scores import Scores, replay_backwards
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train.options import FinetuneOptions
from oracles import scrambled

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


def gpt2_base(path: Path, n_embd: int = 6) -> Path:
    tokenizer = byte_tokenizer()
    config = onfoot.GPT2Config(vocab_size=tokenizer.size, n_positions=12, n_embd=n_embd, n_layer=2, n_head=2)
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


def scores_of(
    run: Path, memory: int | None = None, since: int = 0, query: dict[str, str] = QUERY
) -> tuple[OpenRun, Scores, float, Any]:
    """The run, the scores of its examples, the query's loss at its end, and the query."""
    opened = open_run(run, "last", memory=memory)
    replay = opened.replay
    asked = encode_query(opened.trainer, query)
    replay.put_params(replay.at(opened.last).params)
    loss, gradient = asked.loss(replay.model), replay.layout.flat(asked.gradient(replay.model))
    steps = replay.backwards(replay.plan(opened.last, since))
    (scores,) = replay_backwards(replay, steps, [gradient], len(opened.examples))
    return opened, scores, loss, asked


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


def lora_options(base: Path, data: Path, **changes: Any) -> FinetuneOptions:
    return FinetuneOptions(model=str(base), data=[str(data)], r=2, alpha=3.0, **LOOP | changes)
