"""A run's folder: begun once, resumed as often as needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from onfoot.train.checkpoint import newest_sound
from onfoot.train.loop import Trainer
from onfoot.train.options import LoopOptions

Options = TypeVar("Options", bound=LoopOptions)
Build = Callable[[Path, Options, Path | None], Trainer]  # the run's folder, its options, a checkpoint or None


def begin(run: Path, options: Options, build: Build[Options]) -> Trainer:
    """A run in a new folder. One that cannot begin leaves nothing behind."""
    if (run / "run.json").exists():
        raise ValueError(f"{run} holds a run already; resume it with --resume {run}, or choose another --out")
    if run.exists() and any(run.iterdir()):
        raise ValueError(f"{run} is not empty; choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    options.save(run / "run.json")  # first: killed from here on, the run can be resumed
    try:
        trainer = build(run, options, None)
        trainer.options.save(run / "run.json")  # with what only the data could tell
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
    return trainer


def resume(run: Path, kind: type[Options], build: Build[Options]) -> tuple[Trainer, list[str]]:
    """A run where its newest sound checkpoint left it, and a line about each newer one that is not sound."""
    if not (run / "run.json").is_file():
        raise ValueError(f"{run} is not a run: it has no run.json")
    checkpoint, complaints = newest_sound(run)
    return build(run, kind.load(run / "run.json"), checkpoint), complaints
