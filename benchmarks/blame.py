"""Scores of `onfoot blame` against really retrained leave-out losses, with TracIn beside them, and a replay's cost.

    python benchmarks/blame.py --out benchmarks/blame.json

trains a small model on generated sentences and fine-tunes it with LoRA on lines that contradict some of them. For
single examples and for random groups, it leaves their targets out of every step, trains again, and compares the change
of the queries' losses with the scores. Takes several minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.blame.fast import tracin
from onfoot.blame.leave_out import retrained_losses
from onfoot.blame.query import encode_query
from onfoot.blame.run import OpenRun, open_run
from onfoot.blame.scores import replay_backwards
from onfoot.threads import set_threads
from onfoot.train import finetune, pretrain
from onfoot.train.options import FinetuneOptions, TrainOptions

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
]
CITIES = ["Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Lisbon", "Dublin", "Prague"]
FOODS = ["apples", "bread", "cheese", "rice", "soup", "fish", "cake", "pears", "beans", "plums"]
PETS = ["cat", "dog", "horse", "bird", "rabbit"]
LOOP: dict[str, Any] = {"sample_tokens": 0, "eval_every": 10_000, "eval_windows": 8}


def sentences(n: int) -> list[str]:
    """Facts about twenty people, each repeated many times."""
    rng = random.Random(0)
    city, food, pet = ({name: rng.choice(many) for name in NAMES} for many in (CITIES, FOODS, PETS))
    forms = ("{n} lives in {c}.", "{n} likes {f}.", "{n} has a {p}.", "{n} from {c} eats {f}.")
    chosen = ((rng.choice(NAMES), rng.choice(forms)) for _ in range(n))
    return [form.format(n=name, c=city[name], f=food[name], p=pet[name]) for name, form in chosen]


def moved(n: int) -> list[dict[str, str]]:
    """Lines for fine-tuning: where people live now; one in eight is wrong."""
    rng = random.Random(1)
    city = {name: rng.choice(CITIES) for name in NAMES}
    names = [rng.choice(NAMES) for _ in range(n)]
    cities = [city[name] if rng.random() < 7 / 8 else rng.choice(CITIES) for name in names]
    return [
        {"prompt": f"{name} lives in", "completion": f" {where}."} for name, where in zip(names, cities, strict=True)
    ]


def correlations(predicted: np.ndarray, actual: np.ndarray) -> dict[str, Any]:
    """Pearson and Spearman correlations for each query, (sets, queries), and their means."""
    ranks = [np.argsort(np.argsort(x, axis=0), axis=0) for x in (predicted, actual)]
    pairs = {"pearson": (predicted, actual), "spearman": ranks}
    each = {
        name: [float(np.corrcoef(a, b)[0, 1]) for a, b in zip(x.T, y.T, strict=True)] for name, (x, y) in pairs.items()
    }
    return {name: {"mean": round(float(np.mean(v)), 4), "each": [round(x, 4) for x in v]} for name, v in each.items()}


def measure(run: Path, lines: list[dict[str, str]], n_sets: int, share: float) -> dict[str, Any]:
    """Correlations of the exact scores and of TracIn with the retrained losses, and seconds."""
    opened = open_run(run, "last")
    replay, last, n = opened.replay, opened.last, len(opened.examples)
    queries = [encode_query(opened.trainer, line) for line in lines]
    replay.put_params(replay.at(last).params)
    gradients = [replay.layout.flat(query.gradient(replay.model)) for query in queries]
    before = retrained_losses(replay, last, queries, [])
    exact = replay_backwards(replay, replay.backwards(replay.plan(last)), gradients, n)
    fast = tracin(replay, last, queries, n)
    rng = np.random.default_rng(0)
    seen = np.array(sorted(exact[0].by_step))
    sets = {
        "single examples": [[int(i)] for i in rng.choice(seen, n_sets, replace=False)],
        f"groups of {share:.0%}": [rng.choice(seen, round(share * len(seen)), False).tolist() for _ in range(n_sets)],
    }
    results: dict[str, Any] = {"examples": n, "queries": lines, "cost": cost(run, lines[0])}
    for name, chosen in sets.items():
        actual = np.array([retrained_losses(replay, last, queries, one) for one in chosen]) - before
        totals = {"exact": exact, "tracin": fast}
        results[name] = {"sets": len(chosen), "largest_change_nats": round(float(np.abs(actual).max()), 4)} | {
            kind: correlations(np.array([[s.totals[one].sum() for s in scores] for one in chosen]), actual)
            for kind, scores in totals.items()
        }
        print(name, {kind: results[name][kind]["pearson"] for kind in totals}, file=sys.stderr, flush=True)
    return results


def time_one_query(opened: OpenRun, gradient: np.ndarray) -> float:
    """Seconds of one query, all steps."""
    replay = opened.replay
    begin = time.monotonic()
    replay_backwards(replay, replay.backwards(replay.plan(opened.last)), [gradient], len(opened.examples))
    return time.monotonic() - begin


def cost(run: Path, line: dict[str, str]) -> dict[str, Any]:
    """Seconds of the training steps and of one query; the best of three."""
    opened = open_run(run, "last")
    replay, last = opened.replay, opened.last
    query = encode_query(opened.trainer, line)
    replay.put_params(replay.at(last).params)
    gradient = replay.layout.flat(query.gradient(replay.model))
    training, blame = [], []
    for _ in range(4):  # the first one is recorded
        begin = time.monotonic()
        retrained_losses(replay, last, [query], [])
        training.append(time.monotonic() - begin)
        blame.append(time_one_query(opened, gradient))
    best = min(training[1:]), min(blame[1:])
    return {
        "steps": last, "parameters": replay.model.n_trainable, "training_seconds": round(best[0], 3),
        "blame_seconds": round(best[1], 3), "blame_over_training": round(best[1] / best[0], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", type=int, default=40, help="leave-out sets of each kind")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    set_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "facts.txt").write_text("\n".join(sentences(900)) + "\n")
        (path / "moved.jsonl").write_text("".join(json.dumps(line) + "\n" for line in moved(120)))
        queries = [
            {"prompt": "Anna lives in", "completion": " London."},
            {"prompt": "Victor likes", "completion": " apples."},
            {"prompt": "Rosa has a", "completion": " rabbit."},
        ]
        sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "batch_size": 16, "warmup": 100}
        text: dict[str, Any] = {"texts": [str(path / "facts.txt")], "tokenizer": "char", **sizes, **LOOP}
        results: dict[str, Any] = {
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": arguments.threads},
            "onfoot": onfoot.__version__,
        }
        default = TrainOptions(steps=30, keep_trajectory=10, **LOOP)
        pretrain.start(path / "default", default).train()
        line = {"prompt": "The import", "completion": " statement"}
        results["default sizes of onfoot train"] = {"cost": cost(path / "default", line)}
        for lr in (3e-4, 1e-3):
            run = path / f"train-{lr:g}"
            pretrain.start(run, TrainOptions(steps=300, context=32, lr=lr, keep_trajectory=50, **text)).train()
            results[f"train, lr {lr:g}"] = measure(run, queries, arguments.sets, 0.05)
        pretrain.start(path / "base", TrainOptions(steps=600, context=64, lr=3e-3, **text)).train()
        queries = [{"prompt": f"{name} lives in", "completion": " Rome."} for name in ("Anna", "Victor", "Rosa")]
        for lr in (5e-4, 2e-3):
            tune = FinetuneOptions(
                model=str(path / "base" / "last"), data=[str(path / "moved.jsonl")], epochs=6.0, batch_size=4, lr=lr,
                r=4, warmup=10, keep_trajectory=20, **LOOP,
            )  # fmt: skip
            run = path / f"lora-{lr:g}"
            finetune.start(run, tune).train()
            results[f"lora, lr {lr:g}"] = measure(run, queries, arguments.sets, 0.1)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
