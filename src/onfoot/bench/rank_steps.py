"""The cost of data-parallel steps: run by every rank under mpiexec, `python -m onfoot.bench.rank_steps`, prints JSON.

Steps without all-reduce, with all-reduce after the backward pass, and with all-reduce during it are measured in turn,
so that other load on the machine affects all three alike.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np

from onfoot.bench.machine import peak_bytes
from onfoot.config import GPT2Config
from onfoot.models.load import create
from onfoot.models.model import Model
from onfoot.train.buckets import AllReduceGradients, BucketedGradients, ReduceScatterGradients
from onfoot.train.optimizer import AdamW
from onfoot.train.parallel import World, world
from onfoot.train.shard import ShardedAdamW
from onfoot.train.vector import BucketLayout

KINDS = ("alone", "after", "during")


def measure(config: GPT2Config, rows: int, context: int, rounds: int, bucket_mb: float, shard: bool) -> dict[str, Any]:
    """Medians over the rounds, in seconds per step, and the peak memory; both are the maximum over the ranks.

    `rows` is the total of all ranks. Memory is measured first, on steps as in a run: sums that wait for the end of the
    backward pass, or that never start, would keep all their buckets.
    """
    ranks = world()
    mine = ranks.share.of(rows)
    if rows < ranks.size:
        raise ranks.agreed(ValueError(f"rows must be >= {ranks.size}, one per rank, got {rows}"))
    model = create(config)
    layout = BucketLayout.of(model, bucket_mb, ranks.size)
    optimizer = ShardedAdamW(model, ranks, layout) if shard and ranks.size > 1 else AdamW(model)
    sums: BucketedGradients | None = None
    if ranks.size > 1:
        sums = (ReduceScatterGradients if shard else AllReduceGradients)(ranks, layout, model)
    rng = np.random.default_rng(ranks.rank)
    tokens, targets = rng.integers(0, config.vocab_size, (2, len(mine), context))
    found: dict[str, list[float]] = {}
    for _ in range(2):  # also the warm-up
        _step(ranks, model, optimizer, sums, tokens, targets, KINDS[-1])
    memory = peak_bytes() / 1e6
    buffers = sums.buffer_bytes / 1e6 if isinstance(sums, ReduceScatterGradients) else 0.0
    for _ in range(rounds):
        for kind in KINDS if sums is not None else KINDS[:1]:
            for name, seconds in _step(ranks, model, optimizer, sums, tokens, targets, kind).items():
                found.setdefault(name, []).append(seconds)
        if sums is not None:
            found.setdefault("sums", []).append(_sums_only(ranks, sums))
    times = {name: median(seconds) for name, seconds in found.items()}
    return {
        "ranks": ranks.size,
        "shard": shard,
        "parameters": model.n_trainable,
        "bytes": model.n_trainable * np.dtype(model.dtype).itemsize,
        "tail_bytes": _tail(layout) * np.dtype(model.dtype).itemsize,
        "buckets": len(layout.lengths),
        "bucket_mb": bucket_mb,
        "tokens": rows * context,
        "seconds": times,
        "hidden": None
        if sums is None or not rounds
        else 1 - (times["during: moving"] + times["during: waiting"]) / times["after: waiting"],
        "memory_mb": max(ranks.table(memory)[:, 0].tolist()),
        "buffers_mb": max(ranks.table(buffers)[:, 0].tolist()),
    }


def _tail(layout: BucketLayout) -> int:
    """The elements whose sums cannot start before the backward pass ends: the buckets that hold the tables."""
    positions = list(layout.places)[-2]
    return sum(layout.lengths[layout.places[positions][0].bucket :])


def _step(
    ranks: World, model: Model, optimizer: AdamW, sums: BucketedGradients | None, tokens: Any, targets: Any, kind: str
) -> dict[str, float]:
    """One step's times by name.

    Ranks do not finish their backward passes at the same time, and early ones always wait for the others. So `waiting`
    is from the end of the last rank's backward pass until all ranks have all sums. The clock is the host's, the same
    for its ranks.
    """
    ranks.table(0.0)  # a barrier
    begun = time.perf_counter()
    moving = 0.0
    if sums is None:
        _, grads = model.loss_and_grads(tokens, targets)
        made = time.perf_counter()
    else:
        sums.begin()
        sums.overlap = kind == "during"
        if kind != "alone":
            sums.last()
        model.loss_and_grads(tokens, targets, divisor=float(targets.size * ranks.size), on_gradient=sums.add)
        made = time.perf_counter()
        grads = sums.finish() if kind != "alone" else {}
        moving = sums.times.moving
    summed = time.perf_counter()
    if grads:
        optimizer.step(grads, 1e-6)
    ended = time.perf_counter()
    every = ranks.table(begun, made, summed, moving, ended - summed)
    out = {f"{kind}: gradients": every[:, 2].max() - every[:, 0].max()}
    if grads:
        out["update"] = every[:, 4].max()
    if sums is not None and kind != "alone":
        out[f"{kind}: moving"] = every[:, 3].max()
        out[f"{kind}: waiting"] = every[:, 2].max() - every[:, 1].max()
    return {name: float(seconds) for name, seconds in out.items()}


def _sums_only(ranks: World, sums: BucketedGradients) -> float:
    """The time of the sums of one step alone."""
    sums.begin()
    sums.overlap = False
    ranks.table(0.0)
    begun = time.perf_counter()
    sums.finish()
    return float(ranks.table(time.perf_counter() - begun).max())


def main() -> None:
    """Parses options and measures; rank 0 prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 6), ("width", 384), ("heads", 6), ("vocab", 8192), ("context", 128), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=5, help="Rounds to measure; 0 measures memory only.")
    parser.add_argument("--bucket-mb", type=float, default=8.0)
    parser.add_argument("--shard", action="store_true")
    asked = parser.parse_args()
    config = GPT2Config(
        n_layer=asked.layers,
        n_embd=asked.width,
        n_head=asked.heads,
        vocab_size=asked.vocab,
        n_positions=asked.context,
    )
    result = measure(config, asked.rows, asked.context, asked.rounds, asked.bucket_mb, asked.shard)
    if world().writes:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
