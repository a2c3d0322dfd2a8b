"""Opens a finished run to replay it, without writing into its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onfoot.blame.examples import Examples, LineExamples, WindowExamples
from onfoot.blame.replay import Replay
from onfoot.data.sft import SftSource
from onfoot.formats.files import read_json, shown
from onfoot.formats.run_folder import best_of, checkpoints, complaint, step_of, validate_once
from onfoot.own_engine import is_own
from onfoot.threads import set_threads
from onfoot.train import finetune, pretrain
from onfoot.train.lock import refuse_while_training
from onfoot.train.log import Log
from onfoot.train.loop import Trainer
from onfoot.train.options import FinetuneOptions, TrainingOptions, TrainOptions
from onfoot.train.parallel import world
from onfoot.train.pretrain import MANIFEST
from onfoot.train.runs import RUN_FILE, read_options
from onfoot.train.sources import TextSource


@dataclass
class OpenRun:
    """A run, ready to be replayed up to the checkpoint `last`."""

    path: Path
    replay: Replay
    examples: Examples
    last: int  # the step of the checkpoint that is explained
    warnings: list[str]

    @property
    def trainer(self) -> Trainer:
        return self.replay.trainer


def open_run(run: Path, checkpoint: str = "best", threads: int | None = None, memory: int | None = None) -> OpenRun:
    """Opens a run at its best or last checkpoint, or at that of a given step, or raises ValueError.

    `threads` are the run's own by default, and `memory`, for kept states, is a quarter of the machine's.
    """
    options, made_with = _options(run)
    _refuse(run, options)
    refuse_while_training(run)
    valid, warnings = _checkpoints(run)
    last = _chosen(run, checkpoint, valid)
    n_threads = threads or int(made_with.get("threads") or 0)
    if n_threads:
        set_threads(n_threads)
    engine = made_with.get("engine") or options.engine
    if is_own(engine):  # Python code, which a run folder from elsewhere must not start
        raise ValueError(f"{run}: onfoot blame cannot replay a run on the engine {shown(engine)}")
    trainer = _trainer(run, replace(options, engine=engine))
    examples = _examples(trainer)
    return OpenRun(run, Replay(trainer, valid, memory or default_memory()), examples, last, warnings)


def default_memory() -> int:
    """A quarter of the machine's memory, in bytes."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):  # not known on every system
        return 1 << 30


def _options(run: Path) -> tuple[Any, dict[str, Any]]:
    """The options of a run, and the versions that it was made with."""
    if not (run / RUN_FILE).is_file():
        raise ValueError(f"{run} is not a run folder: it has no {RUN_FILE}")
    command = read_json(run / RUN_FILE).get("command")
    kinds: dict[Any, type[TrainingOptions]] = {"train": TrainOptions, "finetune": FinetuneOptions}
    if command not in kinds:
        raise ValueError(f"{run / RUN_FILE}: unknown command {shown(command)}; expected train or finetune")
    return read_options(run, kinds[command])


def _refuse(run: Path, options: TrainingOptions) -> None:
    """Raises ValueError for runs that cannot be replayed here."""
    fixed = ("batch_size", "accumulate", "clip")
    changed = [c["step"] for c in options.changes if set(fixed) & set(c["before"])]
    if changed:
        raise ValueError(
            f"{run}: its batch size or clipping was changed at step {changed[0]:,}, which blame cannot replay yet; "
            f"runs whose steps or learning rate were changed can be explained"
        )
    if world().size > 1:
        raise ValueError("onfoot blame runs on one rank; start it without mpiexec")
    if any("waiting" in record for record in Log(run / "log.jsonl").read()):
        raise ValueError(f"{run} was trained on several ranks, whose sums cannot be repeated here; train on one rank")
    if options.dp_clip is not None:
        raise ValueError(f"{run} was trained with --dp-clip: steps that clip each example cannot be replayed backwards")
    if options.not_replayed:
        raise ValueError(f"{run} was trained with {options.not_replayed[0]}, which blame cannot replay yet")
    needed = [run / "data.json"]
    if isinstance(options, TrainOptions):
        needed += [run / "data" / name for name in ("tokens.bin", "tokens.json", MANIFEST)]
    if isinstance(options, FinetuneOptions) or options.init is not None:  # type: ignore[attr-defined]
        needed.append(run / "base.json")
    for path in needed:
        if not path.is_file():
            raise ValueError(f"{path} is missing, so the run cannot be replayed; restore it, or train again")


def _checkpoints(run: Path) -> tuple[dict[int, Path], list[str]]:
    """The valid checkpoints by step, and a warning for each invalid one."""
    problems = {folder: validate_once(folder) for folder in checkpoints(run)}
    valid = {step_of(folder): folder for folder, problem in problems.items() if problem is None}
    return valid, [complaint(folder, problem) for folder, problem in problems.items() if problem is not None]


def _chosen(run: Path, checkpoint: str, valid: dict[int, Path]) -> int:
    """The step of the checkpoint to explain."""
    if not valid:
        raise ValueError(f"the run {run} has no valid checkpoint")
    newest = max(valid)
    if checkpoint in ("best", "last"):
        step = newest if checkpoint == "last" else step_of(best_of(run, valid[newest]))
    elif checkpoint.isdecimal() and int(checkpoint) in valid:
        step = int(checkpoint)
    else:
        known = ", ".join(map(str, valid))
        raise ValueError(f"unknown checkpoint {shown(checkpoint)}; choose best, last, or the step of one: {known}")
    if step == 0:
        raise ValueError("the checkpoint of step 0 is the initial state: no example has been trained on yet")
    return step


def _trainer(run: Path, options: TrainingOptions) -> Trainer:
    """The run's trainer at step 0. The base model and the data must be those of the training."""
    if isinstance(options, TrainOptions):
        return pretrain.make_trainer(run, options, None)
    assert isinstance(options, FinetuneOptions)
    return finetune.make_trainer(run, options, None)


def _examples(trainer: Trainer) -> Examples:
    tokenizer, source = trainer.model.tokenizer, trainer.source
    assert tokenizer is not None
    if isinstance(source, SftSource):
        return LineExamples(source.train, tokenizer)
    assert isinstance(source, TextSource)
    assert trainer.folder is not None
    return WindowExamples(trainer.folder / "data", source.train, tokenizer)
