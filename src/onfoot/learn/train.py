"""`onfoot learn train`: trains a small GPT-2 with the learner's gradients, and with ours for what is not solved yet.

`own_pairs.py` judges which are right. A wrong one is trained only beside a right one (`compare.py`), so that both
curves can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onfoot.data.windows import Windows, split
from onfoot.formats.tokenizer import Tokenizer
from onfoot.learn.own_pairs import Functions, Network, solved_in
from onfoot.models.load import create
from onfoot.models.model import Model
from onfoot.models.own_network import OwnNetwork
from onfoot.models.params import Drawn
from onfoot.own_engine import OwnEngine
from onfoot.terminal import shell_word
from onfoot.train.callbacks import Callback, Step
from onfoot.train.loop import Trainer
from onfoot.train.options import TrainOptions
from onfoot.train.pretrain import new_config, prepare_data
from onfoot.train.sources import TextSource

JUDGING = "judging your gradients; Ctrl-C ends a loop that does not end"
OUT = "train"  # the folder of runs, in that of the exercises
SIZES: dict[str, Any] = {
    "arch": "gpt2", "tokenizer": "byte", "n_layer": 2, "n_head": 4, "n_embd": 64, "context": 64, "batch_size": 8,
    "steps": 300, "eval_every": 100, "eval_windows": 32, "save_every": 100, "sample_tokens": 80, "engine": "numpy",
    "engine_unchecked": True,
}  # fmt: skip


@dataclass
class Result:
    """A run: its validation loss, its training losses, a sample, and its folder."""

    validation_loss: float
    losses: list[float]
    sample: str
    folder: Path


def options_for(steps: int | None = None, seed: int = 0, **changes: Any) -> TrainOptions:
    """The options of a run: a model small enough to train in about a minute with NumPy."""
    given = {"steps": steps} if steps is not None else {}
    return TrainOptions(**{**SIZES, **given, "seed": seed, **changes})


class Text:
    """The text of all runs in a folder, tokenized once, as batches."""

    def __init__(self, out: Path, options: TrainOptions) -> None:
        self.options = options
        self.tokenizer: Tokenizer
        self.tokenizer, tokens = prepare_data(out, options, has_checkpoint=False)
        parts = split(tokens, options.validation, options.context)
        train, held_out = (Windows(part, options.context, options.seed) for part in parts)
        self.source = TextSource(train, held_out, options.batch_size, options.accumulate, options.eval_windows)
        self.config = new_config(options, self.tokenizer)

    def model(self, functions: Functions, files: Mapping[str, str], network: Network | None = None) -> Model:
        """A new model on these pairs; always with the same initial values."""
        engine: Any = OwnEngine(functions, files, "your exercises") if functions else "numpy"
        options = self.options
        if network is None:
            model = create(self.config, options.seed, options.dtype, engine)
        else:
            drawn = Drawn(self.config, options.seed, options.dtype)
            model = OwnNetwork(self.config, drawn, options.dtype, engine, *network)
        model.tokenizer = self.tokenizer
        return model


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.losses.append(step.loss)


def run(model: Model, text: Text, out: Path) -> Result:
    """Trains a model to the last step of its options."""
    curve = _Losses()
    trainer = Trainer(model, text.source, text.options, [curve], out=out)
    outcome = trainer.run()
    return Result(outcome.validation_loss or outcome.state.best_loss, curve.losses, trainer.sample() or "", out)


def next_folder(out: Path) -> Path:
    """The first of out/001, out/002, ... that does not exist."""
    return next(p for i in range(1, 10**6) if not (p := out / f"{i:03d}").exists())


def train(folder: Path, options: TrainOptions, say: Callable[[str], None], out: Path | None = None) -> Result:
    """Trains with the right pairs of a folder, and says whose each gradient is."""
    where = out or folder / OUT
    text = Text(where, options)
    say(JUDGING)
    solved = solved_in(folder, text)
    say(solved.table())
    network = solved.network if solved.all_pairs else None
    result = run(text.model(solved.right, solved.files, network), text, next_folder(where))
    say(f"\nvalidation loss {result.validation_loss:.4f} nats per token; curve {result.folder / 'loss.png'}")
    if result.sample:
        say("sample:\n  " + result.sample.replace("\n", "\n  "))
    say(f'next    onfoot generate {shell_word(result.folder / "best")} --prompt "the "')
    say(f"\n{solved.summary()}")
    return result
