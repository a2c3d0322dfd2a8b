"""A run's folder: begun once, resumed as often as needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from onfoot.train.checkpoint import newest_sound
from onfoot.train.loop import Trainer
from onfoot.train.options import LoopOptions
from onfoot.train.parallel import world

Options = TypeVar("Options", bound=LoopOptions)
Build = Callable[[Path, Options, Path | None], Trainer]  # the run's folder, its options, a checkpoint or None


def begin(run: Path, options: Options, build: Build[Options]) -> Trainer:
    """A run in a new folder. One that cannot begin leaves nothing behind but a folder that was there before."""
    ranks = world()
    ranks.hush()
    run = Path(ranks.hear(str(run))[0])
    with ranks.guard(run, options.command):
        users = run.exists()  # an empty folder that the user has made
        ranks.together(lambda: ranks.first(lambda: _found(run, options), lambda: ranks.see(run / "run.json")))
        try:
            trainer = ranks.together(lambda: build(run, options, None))
            if ranks.writes:
                trainer.options.save(run / "run.json")  # with what only the data could tell
        except BaseException:
            if ranks.writes:
                _clear(run, users)
            raise
    return trainer


def _found(run: Path, options: LoopOptions) -> None:
    """Makes the run's folder."""
    if (run / "run.json").exists():
        raise ValueError(f"{run} holds a run already; resume it with --resume {run}, or choose another --out")
    if run.exists() and any(run.iterdir()):
        raise ValueError(f"{run} is not empty; choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    options.save(run / "run.json")  # first: killed from here on, the run can be resumed


def _clear(run: Path, keep_folder: bool) -> None:
    """Removes what a run that could not begin has written, and its folder unless that is to be kept."""
    for path in run.iterdir() if keep_folder else [run]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def resume(run: Path, kind: type[Options], build: Build[Options]) -> tuple[Trainer, list[str]]:
    """A run where its newest sound checkpoint left it, and a line about each newer one that is not sound."""
    ranks = world()
    ranks.hush()
    with ranks.guard(run, kind.command):
        options = ranks.together(lambda: _options(run, kind))
        found = ranks.together(lambda: _newest(run) if ranks.writes else None)  # one rank reads all of every file
        checkpoint, complaints = ranks.hear(found)[0]
        where = None if checkpoint is None else Path(checkpoint)
        return ranks.together(lambda: build(run, options, where)), complaints


def _options(run: Path, kind: type[Options]) -> Options:
    if not (run / "run.json").is_file():
        raise ValueError(f"{run} is not a run: it has no run.json")
    return kind.load(run / "run.json")


def _newest(run: Path) -> tuple[str | None, list[str]]:
    checkpoint, complaints = newest_sound(run)
    return None if checkpoint is None else str(checkpoint), complaints
