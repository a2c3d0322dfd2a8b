"""A run's folder: begun once, resumed as often as needed, by one process at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from onfoot.formats.files import read_json
from onfoot.formats.huggingface import write_json
from onfoot.train.checkpoint import go_back
from onfoot.train.files import flush
from onfoot.train.fingerprint import made_with
from onfoot.train.lock import LOCK, take_lock
from onfoot.train.loop import Trainer
from onfoot.train.options import LoopOptions
from onfoot.train.parallel import world

Options = TypeVar("Options", bound=LoopOptions)
Build = Callable[[Path, Options, Path | None], Trainer]  # the run's folder, its options, a checkpoint or None

RECORD = "run.json"
UNBEGUN = (LOCK, f"{RECORD}.new", "data")  # what may lie in a folder where a run was killed before it began


def begin(run: Path, options: Options, build: Build[Options]) -> Trainer:
    """A run in a new folder. One that cannot begin leaves nothing behind but a folder that was there before."""
    ranks = world()
    ranks.silence_stdout()
    run = Path(ranks.allgather_json(str(run))[0])
    with ranks.guard(run, options.command):
        users = run.exists()  # an empty folder that the user has made
        lock = ranks.run_all_or_raise(
            lambda: ranks.rank0_first(
                lambda: _create_run_folder(run, options), lambda: ranks.wait_for_path(run / RECORD)
            )
        )
        try:
            trainer = ranks.run_all_or_raise(lambda: build(run, options, None))
            trainer.lock = lock
            if ranks.writes:
                _record(run, trainer.options, made_with(trainer.model))  # with what only data and model could tell
        except BaseException:
            if lock is not None:
                _clear(run, users, lock)
            raise
    return trainer


def _create_run_folder(run: Path, options: LoopOptions) -> FileLock:
    """Makes the run's folder, and takes its lock."""
    _refuse_taken(run)
    users = run.exists()
    run.mkdir(parents=True, exist_ok=True)
    lock = take_lock(run)
    try:
        _refuse_taken(run)  # another process may have been here before the lock was taken
        _record(run, options, {})  # first: killed from here on, the run can be resumed
    except BaseException:
        _clear(run, users, lock)
        raise
    return lock


def _refuse_taken(run: Path) -> None:
    if (run / RECORD).exists():
        raise ValueError(f"{run} holds a run already; resume it with --resume {run}, or choose another --out")
    if run.exists() and not all(map(_unbegun, run.iterdir())):
        raise ValueError(f"{run} is not empty; choose another --out")


def _unbegun(path: Path) -> bool:
    """Whether that can be of a run that was killed before it began."""
    return path.name in UNBEGUN and not path.is_symlink() and not (path.is_dir() and any(path.iterdir()))


def _clear(run: Path, keep_folder: bool, lock: FileLock) -> None:
    """Removes what a run that could not begin has written, and its folder unless that is to be kept.

    What makes it a run goes last: killed before that, it is one that can be resumed.
    """
    for path in sorted(run.iterdir(), key=lambda p: (p.name == RECORD, p.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
    if sys.platform == "win32":  # where an open file cannot be removed
        lock.release(force=True)
    (run / LOCK).unlink(missing_ok=True)
    lock.release(force=True)
    if not keep_folder:
        with suppress(OSError):  # another process may have begun a run there already
            run.rmdir()


def resume(run: Path, kind: type[Options], build: Build[Options]) -> tuple[Trainer, list[str]]:
    """A run where its newest sound checkpoint left it, and what is to be said: what is damaged, what is different."""
    ranks = world()
    ranks.silence_stdout()
    with ranks.guard(run, kind.command):
        lock = ranks.run_all_or_raise(lambda: _lock(run) if ranks.writes else None)
        try:
            options, made_then = ranks.run_all_or_raise(lambda: _options(run, kind))
            found = ranks.run_all_or_raise(
                lambda: _newest(run) if ranks.writes else None
            )  # one rank reads all of every file
            checkpoint, complaints = ranks.allgather_json(found)[0]
            where = None if checkpoint is None else Path(checkpoint)
            trainer = ranks.run_all_or_raise(lambda: build(run, options, where))
            trainer.lock = lock
            made_now = made_with(trainer.model)
            if where is None and ranks.writes:
                _record(run, trainer.options, made_now)
        except BaseException:
            if lock is not None:
                lock.release(force=True)
            raise
        changes = [] if where is None else _changes(made_then, made_now)
        return trainer, [*complaints, *trainer.complaints, *changes]


def _lock(run: Path) -> FileLock:
    if not (run / RECORD).is_file():
        raise ValueError(f"{run} is not a run: it has no {RECORD}")
    return take_lock(run)


def _record(run: Path, options: LoopOptions, made: dict[str, Any]) -> None:
    """Writes run.json: the options, what the run is computed with, and a hash of that."""
    values = {"command": options.command, **asdict(options), "made_with": made}
    write_json(run / RECORD, {**values, "sha256": _hash(values)})
    flush(run / RECORD)
    flush(run)


def _options(run: Path, kind: type[Options]) -> tuple[Options, dict[str, Any]]:
    """What a run was begun with."""
    path = run / RECORD
    values = read_json(path)
    options = kind.load(path)
    sha256, made = values.pop("sha256", None), values.get("made_with")
    if sha256 is not None and sha256 != _hash(values):
        raise ValueError(
            f"{path} has changed since the run was begun (its SHA-256 is not the one it records); put back what was "
            f'there, or begin a new run. To go on with the change, remove the entry "sha256"'
        )
    return options, made if isinstance(made, dict) else {}


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _newest(run: Path) -> tuple[str | None, list[str]]:
    checkpoint, complaints = go_back(run)
    return None if checkpoint is None else str(checkpoint), complaints


def _changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line about what the run is computed with from here on, where that is not what it was begun with."""
    other = [name for name in now if name in then and then[name] != now[name]]
    if not other:
        return []
    before, after = (", ".join(f"{name} {values[name]}" for name in other) for values in (then, now))
    return [f"this run was begun with {before}, and goes on with {after}: its last bits may differ"]
