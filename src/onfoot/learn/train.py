"""`onfoot learn train`: trains a small GPT-2 with the learner's gradients, and with ours for what is not solved yet.

The folder's files are read in order. A pair is the learner's if it agrees with ours on the first batch; a wrong one is
trained only beside a right one (`compare.py`), so that both curves can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from onfoot.data.windows import Windows, split
from onfoot.formats.tokenizer import Tokenizer
from onfoot.learn.course import EXERCISES
from onfoot.learn.folder import exercise_files
from onfoot.models.compare_pairs import TOLERANCE, Compared, compare_pairs
from onfoot.models.load import create
from onfoot.models.model import Model
from onfoot.models.own_network import OwnNetwork, compare_network
from onfoot.models.params import Drawn
from onfoot.own_engine import NotWrittenError, OwnEngine, PairError
from onfoot.own_engine.load import HALVES, hashes, import_folder
from onfoot.own_engine.pairs import GRADIENTS
from onfoot.terminal import shell_word
from onfoot.train.callbacks import Callback, Step
from onfoot.train.loop import Trainer
from onfoot.train.options import TrainOptions
from onfoot.train.pretrain import new_config, prepare_data
from onfoot.train.sources import TextSource

YOURS, OURS, UNWRITTEN, WRONG = "yours", "onfoot's", "not written yet", "wrong"
NOT_YET = "your {}_backward is not written yet"
JUDGING = "judging your gradients; Ctrl-C ends a loop that does not end"
NETWORK = "gpt2"  # the pass through the whole network
OUT = "train"  # the folder of runs, in that of the exercises
SIZES: dict[str, Any] = {
    "arch": "gpt2", "tokenizer": "byte", "n_layer": 2, "n_head": 4, "n_embd": 64, "context": 64, "batch_size": 8,
    "steps": 300, "eval_every": 100, "eval_windows": 32, "save_every": 100, "sample_tokens": 80, "engine": "numpy",
    "engine_unchecked": True,
}  # fmt: skip

Functions = dict[str, Callable[..., Any]]
Network = tuple[Callable[..., Any], Callable[..., Any]]  # gpt2_forward and gpt2_backward


@dataclass(frozen=True)
class Status:
    """Whose a pair is in this run, and why."""

    pair: str
    verdict: str  # YOURS, OURS, UNWRITTEN or WRONG
    file: str = ""
    words: str = ""  # what is wrong


@dataclass
class Solved:
    """What a folder of exercises provides for one network."""

    statuses: list[Status]
    right: Functions  # the pairs that agree with ours
    wrong: Functions  # those that do not, but can be trained
    network: Network | None = None  # gpt2_forward and gpt2_backward, if right
    files: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # file -> why it cannot be imported

    @property
    def all_pairs(self) -> bool:
        return all(one.verdict == YOURS for one in self.statuses if one.pair != NETWORK)

    @property
    def mistaken(self) -> list[Status]:
        """The pairs that are wrong."""
        return [one for one in self.statuses if one.verdict == WRONG and one.pair != NETWORK]

    @property
    def everything(self) -> bool:
        return self.all_pairs and self.network is not None

    def table(self) -> str:
        """Each pair of the network, and whose it is."""
        width = max(len(one.pair) for one in self.statuses)
        lines = [f"  {one.pair:<{width}}  {_whose(one)}" for one in self.statuses]
        lines += [f"{file} cannot be imported: {why}" for file, why in self.broken.items()]
        return "\n".join(["The gradients of this model:", *lines])

    def summary(self) -> str:
        """The sentence at the end of a run."""
        if self.everything:
            return "Every gradient of this model is yours."
        mine = sum(one.verdict == YOURS for one in self.statuses if one.pair != NETWORK)
        pairs = sum(one.pair != NETWORK for one in self.statuses)
        if self.all_pairs:
            return f"All {pairs} pairs are yours; the pass that calls them (gpt2_forward, gpt2_backward) is onfoot's."
        return f"{mine} of {pairs} pairs are yours; the rest is onfoot's."


def _whose(one: Status) -> str:
    if one.verdict == YOURS:
        return f"yours, {one.file}"
    return f"onfoot's: {one.words}" if one.words else "onfoot's"


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

    def model(self, functions: Functions, files: Mapping[str, str], network: Any = None) -> Model:
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


def solved_in(folder: Path, text: Text, files: Sequence[Path] | None = None) -> Solved:
    """Judges the pairs of a folder of exercises, or of these files of it, on the first batch of a run."""
    modules, broken = import_folder(folder, exercise_files(folder) if files is None else files)
    solved = judged(modules, text)
    solved.broken = {path.name: why.removeprefix(f"cannot import {path}: ") for path, why in broken.items()}
    of_pair = {pair: one.file for one in EXERCISES for pair in (*one.pairs, one.name) if one.file in solved.broken}
    solved.statuses = [
        replace(one, words=f"{of_pair[one.pair]} cannot be imported")
        if one.verdict == OURS and one.pair in of_pair
        else one
        for one in solved.statuses
    ]
    return solved


def judged(modules: Mapping[Path, ModuleType], text: Text) -> Solved:
    """Which pairs of these files agree with ours on the first batch; of several, the last that does."""
    given: dict[str, list[tuple[str, Functions, dict[str, str]]]] = {}
    for path, module in modules.items():
        for pair in GRADIENTS:
            names = [f"{pair}_{half}" for half in HALVES]
            if all(callable(getattr(module, name, None)) for name in names) and defined_in(module, names):
                functions = {name: getattr(module, name) for name in names}
                given.setdefault(pair, []).append((path.name, functions, hashes([module])))
    used = text.model({}, {}).pairs_used()
    out = Solved([], {}, {})
    for pair in used:
        out.statuses.append(_judge(pair, given.get(pair, []), text, out))
    out.statuses.append(_judge_network(modules, text, out))
    return out


def defined_in(module: ModuleType, names: Sequence[str]) -> bool:
    """Whether a file defines one of the functions itself, and does not only import them."""
    return any(getattr(getattr(module, name), "__module__", "") == module.__name__ for name in names)


def _judge(pair: str, candidates: Sequence[tuple[str, Functions, dict[str, str]]], text: Text, out: Solved) -> Status:
    status = Status(pair, OURS, words="no exercise has it yet" if not candidates else "")
    batch = text.source.microbatches(0)[0]
    for file, functions, files in reversed(candidates):
        try:
            found = compare_pairs(text.model(functions, {}), batch.tokens, batch.targets)
        except PairError as error:
            status = Status(pair, WRONG, file, str(error))
            continue
        first = found.first
        if first is None:
            out.right |= functions
            out.files |= files
            return Status(pair, YOURS, file)
        if status.verdict != WRONG:
            status = Status(pair, UNWRITTEN if first.unwritten else WRONG, file, _words(first))
        if not first.unwritten and not first.problem:
            out.wrong |= {name: f for name, f in functions.items() if name not in out.wrong}
    return status


def _words(first: Compared) -> str:
    return NOT_YET.format(first.pair) if first.unwritten else str(first)


def _judge_network(modules: Mapping[Path, ModuleType], text: Text, out: Solved) -> Status:
    """Whether one of the files has the pass through the whole network, and it is right."""
    names = [f"{NETWORK}_{half}" for half in HALVES]
    files = [p for p, m in modules.items() if all(callable(getattr(m, name, None)) for name in names)]
    if not files:
        return Status(NETWORK, OURS, words="no exercise has gpt2_forward and gpt2_backward yet")
    forward, backward = (getattr(modules[files[-1]], name) for name in names)
    verdict, words = judged_network((forward, backward), text)
    if verdict == YOURS:
        out.network = forward, backward
    return Status(NETWORK, verdict, files[-1].name, words)


def judged_network(network: Network, text: Text) -> tuple[str, str]:
    """Whether a pass through the whole network is right, and what is wrong with it."""
    batch = text.source.microbatches(0)[0]
    try:
        name, error = compare_network(text.model({}, {}), *network, batch.tokens[:2], batch.targets[:2])
    except NotWrittenError:
        return UNWRITTEN, NOT_YET.format(NETWORK)
    except PairError as failure:
        return UNWRITTEN, f"it does not run yet: {failure}"
    if not error <= TOLERANCE:
        what = "the loss" if name == "loss" else f"the gradient of {name}"
        return WRONG, f"{what} is wrong: relative error {error:.2g}"
    return YOURS, ""


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
