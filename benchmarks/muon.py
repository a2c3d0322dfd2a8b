"""The time of a training step with Muon, compared with AdamW, and what the formula of its cost predicts.

    python benchmarks/muon.py --out benchmarks/muon.json

Both optimizers take turns, so that a busy machine slows both. Random tokens: needs no data.
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
from onfoot.models.params import hidden_matrices, shapes
from onfoot.threads import set_threads

SMALL = onfoot.GPT2Config(vocab_size=257, n_positions=128, n_embd=128, n_layer=4, n_head=4)
WIDE = onfoot.GPT2Config(vocab_size=257, n_positions=512, n_layer=2)
JOBS = {  # configuration, sequences, tokens
    "width 128": (SMALL, 6, 128),
    "width 128, large batch": (SMALL, 48, 128),
    "width 768": (WIDE, 2, 512),
}


def predicted(config: Any, tokens: int) -> float:
    """Floating-point operations of Muon relative to those of the blocks' linear layers, forward and backward."""
    muon = linear = 0
    for name, parts in hidden_matrices(config).items():
        rows, columns = shapes(config)[name]
        large, small = sorted((rows, columns // len(parts)), reverse=True)
        muon += len(parts) * (20 * large * small**2 + 10 * small**3)
        linear += 6 * tokens * rows * columns
    return muon / linear


def measure(config: Any, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Median seconds of a step with each optimizer, and their ratio."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length))
    models = {"adamw": onfoot.create(config), "muon": onfoot.create(config)}
    optimizers = {"adamw": onfoot.AdamW(models["adamw"]), "muon": onfoot.Muon(models["muon"])}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            begin = time.perf_counter()
            model.train_step(optimizers[name], tokens)
            if turn:  # the first step is recorded
                seconds[name].append(time.perf_counter() - begin)
    ratio = statistics.median(m / a for a, m in zip(seconds["adamw"], seconds["muon"], strict=True))
    medians = {name: round(statistics.median(times), 4) for name, times in seconds.items()}
    extra = round(predicted(config, batch * length), 3)
    return {
        "tokens": batch * length,
        "median_s": medians,
        "ratio": round(ratio, 3),
        "predicted_extra_of_linears": extra,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    found = {}
    for name, job in JOBS.items():
        found[name] = one = measure(*job, arguments.rounds)
        seconds = one["median_s"]
        print(
            f"{name}, {one['tokens']:,} tokens: {seconds['adamw']} s with AdamW, {seconds['muon']} s with Muon, "
            f"{one['ratio']} x (its products: {one['predicted_extra_of_linears']:.0%} of the blocks' linear layers)",
            flush=True,
        )
    if arguments.out is not None:
        values = {"machine": describe(), "threads": arguments.threads, "jobs": found}
        arguments.out.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
