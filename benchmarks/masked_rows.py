"""The time of a fine-tuning step of which 70 % are prompts, with and without logits for the prompts' tokens.

    python benchmarks/masked_rows.py --out benchmarks/masked_rows.json

trains LoRA layers on random tokens; both ways take turns, so that a busy machine slows both. Needs no data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.bench.machine import describe
from onfoot.models import step
from onfoot.models.layout import Targets
from onfoot.models.step import choose
from onfoot.threads import set_threads

JOBS = {
    "GPT-2 124M, LoRA": onfoot.GPT2Config(),
    "SmolLM2-135M, LoRA": onfoot.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, rope_theta=100000.0, tie_word_embeddings=True,
    ),
    "LLaMA of width 128, 32,000 tokens, all weights": onfoot.LlamaConfig(
        vocab_size=32000, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True,
    ),
}  # fmt: skip
PROMPT = 0.7


def measure(name: str, config: Any, rounds: int, batch: int, length: int) -> dict[str, Any]:
    """Median seconds of a step either way, and the difference of the losses."""
    trained = onfoot.create(config, seed=0)
    if "LoRA" in name:
        trained.add_lora(r=16, alpha=16)
    optimizer = onfoot.AdamW(trained, lr=0.0, weight_decay=0.0)
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, config.vocab_size, (batch, length)) for _ in range(2))
    targets[:, : round(PROMPT * length)] = -100
    ways = {"masked": choose, "all": lambda ids, *_, **__: Targets(ids)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    work: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        for way, chosen in ways.items():
            step.choose = chosen  # type: ignore[assignment]
            begin, cpu = time.perf_counter(), time.process_time()
            losses[way] = trained.train_step(optimizer, tokens, targets)
            if turn:  # the first step is recorded
                seconds[way].append(time.perf_counter() - begin)
                work[way].append(time.process_time() - cpu)  # of all threads; a busy machine changes it less
    step.choose = choose
    out: dict[str, Any] = {"job": name, "batch": batch, "length": length, "prompt": PROMPT, "rounds": rounds}
    for way in ways:
        out[way] = {
            "median_s": round(statistics.median(seconds[way]), 4),
            "cpu_s": round(statistics.median(work[way]), 4),
        }
    out["gain"] = round(statistics.median(a / m for a, m in zip(seconds["all"], seconds["masked"], strict=True)), 3)
    out["gain_cpu"] = round(statistics.median(a / m for a, m in zip(work["all"], work["masked"], strict=True)), 3)
    return out | {"difference_of_losses": abs(losses["all"] - losses["masked"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    found = []
    for name, config in JOBS.items():
        found.append(measure(name, config, arguments.rounds, 2, 128))
        one = found[-1]
        steps = f"{one['all']['median_s']} s -> {one['masked']['median_s']} s per step"
        print(f"{name}: {steps}, {one['gain']} x ({one['gain_cpu']} x CPU time)", flush=True)
    if arguments.out is not None:
        values = {"machine": describe(), "threads": arguments.threads, "jobs": found}
        arguments.out.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
