"""The default recipe of `onfoot train` and its neighbours, each for the same time: nats per byte on held-out text.

python benchmarks/recipe.py [--seconds S] [--only NAME...] [--out FILE]. The text is the one of `onfoot train` (the
Python language reference). The default run makes its 500 steps, and its time is that of all others: their steps are as
many as fit, by the time of their first steps, and their schedules end with them. Each neighbour changes one setting.
Only steps are timed, not the tokenizer or evaluations. The default runs with three seeds, to show what chance does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from onfoot.bench.machine import describe
from onfoot.data.compression import as_bytes
from onfoot.train import pretrain
from onfoot.train.loop import Trainer
from onfoot.train.options import TrainOptions

DEFAULT = "the default"
SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "the default, seed 1": {"seed": 1},
    "the default, seed 2": {"seed": 2},
    "bytes": {"tokenizer": "byte"},
    "vocabulary of 512": {"vocab_size": 512},
    "vocabulary of 2,048": {"vocab_size": 2048},
    "1 block": {"n_layer": 1},
    "3 blocks": {"n_layer": 3},
    "4 blocks": {"n_layer": 4},
    "width 96": {"n_embd": 96},
    "width 192": {"n_embd": 192},
    "8 heads": {"n_head": 8},
    "context 64": {"context": 64, "batch_size": 24},
    "context 256": {"context": 256, "batch_size": 6},
    "6 windows per step": {"batch_size": 6},
    "24 windows per step": {"batch_size": 24},
    "learning rate 0.0015": {"lr": 1.5e-3},
    "learning rate 0.006": {"lr": 6e-3},
    "β₂ = 0.95": {"betas": (0.9, 0.95)},
    "β₂ = 0.999": {"betas": (0.9, 0.999)},
    "linear decay": {"schedule": "linear"},
    "decay to 0": {"lr_floor": 0.0},
    "weight decay 0.3": {"weight_decay": 0.3},
    "dropout 0.1": {"dropout": 0.1},
    "averaged weights, 0.99": {"ema": 0.99},
    "GPT-2's architecture": {"arch": "gpt2"},
    "Muon": {"optimizer": "muon"},
}
PROBE = 12  # steps whose time says how many fit; the first three are not counted
EVALUATIONS = 5


def seconds_per_step(trainer: Trainer) -> float:
    """The median of the first steps."""
    times = []
    for number in range(PROBE):
        begin = time.perf_counter()
        trainer.step(trainer.options.learning_rate(number))
        times.append(time.perf_counter() - begin)
    return sorted(times[3:])[len(times[3:]) // 2]


def trained(changes: dict[str, Any], seconds: float | None) -> dict[str, float]:
    """The result of a run of so many seconds, or of the default's steps."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"sample_tokens": 0, "quiet": True, "save_every": 10**6, **changes}
        if settings.get("vocab_size"):
            settings["tokenizer"] = "bpe"
        if seconds is not None:
            probe = pretrain.start(Path(folder) / "probe", TrainOptions(**settings))
            settings["steps"] = max(20, round(seconds / seconds_per_step(probe)))
        trainer = pretrain.start(Path(folder) / "run", TrainOptions(**settings))
        source: Any = trainer.source
        tokens = source.held_out.tokens[: source.eval_windows * source.held_out.context + 1]
        per_byte = (len(tokens) - 1) / len(as_bytes(trainer.model.tokenizer, tokens[1:]))  # type: ignore[arg-type]
        spent, losses, steps = 0.0, [], trainer.options.steps
        for number in range(steps):
            begin = time.perf_counter()
            trainer.step(trainer.options.learning_rate(number))
            trainer.state.step += 1
            if trainer.average is not None:
                trainer.average.update(trainer.state.step)
            spent += time.perf_counter() - begin
            if (number + 1) % max(1, steps // EVALUATIONS) == 0 or number + 1 == steps:
                losses.append(trainer.evaluate().loss * per_byte)  # type: ignore[union-attr]
        return {"nats per byte": losses[-1], "lowest": min(losses), "seconds": spent, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of training; by default those of the default run")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    seconds: float | None = args.seconds
    for name in args.only:
        one = found[name] = trained(SETTINGS[name], seconds)
        seconds = seconds or one["seconds"]
        print(
            f"{name:24} {one['nats per byte']:.3f} nats per byte (lowest {one['lowest']:.3f}) after {one['steps']:4} "
            f"steps in {one['seconds']:5.1f} s",
            flush=True,
        )
        if args.out:
            args.out.write_text(json.dumps({"machine": describe(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
