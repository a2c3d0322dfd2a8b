"""The held-out text of `onfoot train` with more text to learn from and more time: nats per byte, beside `xz -9`.

python benchmarks/more_text.py [--steps N] [--out FILE]. The text of `onfoot train` (the Python language reference) is
used up after its 500 steps. Here the docstrings of the standard library come before it, and its last tenth is held out.
The model is larger, with dropout and averaged weights. The seconds are those of the whole run: steps and evaluations,
without the tokenizer.
"""

from __future__ import annotations

import argparse
import ast
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.bench.machine import describe
from onfoot.data.compression import as_bytes, xz_loss
from onfoot.data.corpus import builtin_text
from onfoot.data.windows import Windows
from onfoot.train.options import TrainOptions
from onfoot.train.pretrain import new_config
from onfoot.train.sources import TextSource

SETTINGS: dict[str, Any] = {"n_layer": 4, "n_embd": 192, "n_head": 6, "dropout": 0.2, "ema": 0.998}
VOCABULARY = 1024
STEPS = 4000
EVALUATIONS = 10
SHORTEST = 80  # characters of a docstring
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data"}


def docstrings() -> str:
    """Those of the standard library's Python files that have some length, one after the other."""
    found = []
    library = Path(ast.__file__).parent
    for file in sorted(library.rglob("*.py")):
        if LEFT_OUT & set(file.relative_to(library).parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append(ast.get_docstring(node) or "")
    return "\n\n".join(text for text in found if len(text) > SHORTEST)


class Curve(onfoot.Callback):
    """The loss per byte at each evaluation, and the seconds until then."""

    def __init__(self, per_byte: float) -> None:
        self.per_byte, self.begin = per_byte, time.perf_counter()
        self.points: list[dict[str, float]] = []

    def on_evaluation(self, trainer: onfoot.Trainer, evaluation: Any) -> None:
        point = {"steps": evaluation.step, "seconds": time.perf_counter() - self.begin}
        self.points.append({**point, "nats per byte": evaluation.loss * self.per_byte})
        print(
            "step {steps:5}, {seconds:6.1f} s: {nats per byte:.3f} nats per byte".format(**self.points[-1]), flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    reference = builtin_text().text or ""
    cut = len(reference) * 9 // 10
    train, held_out = f"{docstrings()}\n\n{reference[:cut]}", reference[cut:]
    sizes = {
        "bytes": len(train.encode()),
        "held-out bytes": len(held_out.encode()),
        "xz -9 after the same text": xz_loss(train.encode(), held_out.encode()),
        "xz -9 after the reference": xz_loss(reference[:cut].encode(), held_out.encode()),
    }
    print("; ".join(f"{name}: {round(value, 3):,}" for name, value in sizes.items()), flush=True)

    tokenizer = onfoot.Tokenizer.bpe(train, VOCABULARY)
    options = TrainOptions(steps=args.steps, eval_every=max(1, args.steps // EVALUATIONS), quiet=True, **SETTINGS)
    parts = [Windows(np.array(tokenizer.encode(text)), options.context, options.seed) for text in (train, held_out)]
    source = TextSource(*parts, options.batch_size, options.accumulate, len(parts[1]))
    judged = parts[1].tokens[1:]
    model = onfoot.create(new_config(options, tokenizer), options.seed, options.dtype)
    model.tokenizer = tokenizer
    curve = Curve(len(judged) / len(as_bytes(tokenizer, judged)))
    onfoot.Trainer(model, source, options, [curve]).run()
    if args.out:
        args.out.write_text(json.dumps({"machine": describe(), **sizes, "curve": curve.points}, indent=1) + "\n")


if __name__ == "__main__":
    main()
