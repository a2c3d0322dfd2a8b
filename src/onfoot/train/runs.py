"""Run folders: created once, resumed as often as needed, used by one process at a time."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from onfoot.formats.files import read_json
from onfoot.formats.run_folder import RUN_FILE, read_state
from onfoot.formats.write import write_json
from onfoot.own_engine import is_own
from onfoot.terminal import listed
from onfoot.train.checkpoint import checkpoint_to_resume
from onfoot.train.fingerprint import CHOSEN, FOLDER, HASHES, made_with
from onfoot.train.lock import LOCK, take_lock
from onfoot.train.loop import Trainer
from onfoot.train.options import CHANGEABLE, TrainingOptions
from onfoot.train.parallel import world
from onfoot.train.start import announce
from onfoot.train.trackers import check_tracker

Options = TypeVar("Options", bound=TrainingOptions)
Build = Callable[[Path, Options, Path | None], Trainer]  # the run's folder, its options, a checkpoint or None

FILES = ("model", "data", "validation_data", "texts", "init")  # options that name files
LEFTOVERS = (LOCK, f".{RUN_FILE}.new", "data")  # what a run that was killed before it started may leave behind


def create(run: Path, options: Options, build: Build[Options]) -> Trainer:
    """Creates a run in a new folder. If it fails, its files are removed, and the folders that it made."""
    ranks = world()
    ranks.silence_stdout()
    run = Path(ranks.allgather_json(str(run))[0])
    with ranks.guard(run, options.command):
        ranks.run_all_or_raise(lambda: check_tracker(options.log) if ranks.writes else None)
        made = _missing(run)
        lock = ranks.run_all_or_raise(
            lambda: ranks.rank0_first(
                lambda: _create_run_folder(run, options), lambda: ranks.wait_for_path(run / RUN_FILE)
            )
        )
        try:
            trainer = ranks.run_all_or_raise(lambda: build(run, options, None))
            ranks.run_all_or_raise(trainer.check_engine)
            trainer.lock = lock
            if ranks.writes:
                chosen = [n for n, value in vars(trainer.options).items() if value != getattr(options, n, value)]
                versions = {**made_with(run, trainer.model), CHOSEN: chosen}
                _record(run, trainer.options, versions)  # again: `build` may have completed the options
        except BaseException:
            if lock is not None:
                _clear(run, made, lock)
            raise
    return trainer


def _missing(run: Path) -> list[Path]:
    """The run folder and those that it is in, from the inside out, as far as they do not exist."""
    return [path for path in (run, *run.parents) if not path.exists()]


def _create_run_folder(run: Path, options: TrainingOptions) -> FileLock:
    """Creates the run folder and acquires its lock."""
    _check_unused(run)
    made = _missing(run)
    run.mkdir(parents=True, exist_ok=True)
    lock = take_lock(run)
    try:
        _check_unused(run)  # another process may have started a run before the lock was acquired
        _record(run, options, {})  # first: from here on, a killed run can be resumed
    except BaseException:
        _clear(run, made, lock)
        raise
    return lock


def _check_unused(run: Path) -> None:
    if (run / RUN_FILE).exists():
        raise ValueError(f"{run} already contains a run; resume it with --resume {run}, or choose another --out")
    if run.exists() and not all(map(_is_leftover, run.iterdir())):
        raise ValueError(f"{run} is not empty; choose another --out")


def _is_leftover(path: Path) -> bool:
    """Whether a run that was killed before it started may have left this path behind."""
    return path.name in LEFTOVERS and not path.is_symlink() and not (path.is_dir() and any(path.iterdir()))


def _clear(run: Path, made: list[Path], lock: FileLock) -> None:
    """Removes the files of a run that could not start, and the folders that were made for it.

    run.json is removed last: if this is killed earlier, the run can still be resumed.
    """
    for path in sorted(run.iterdir(), key=lambda p: (p.name == RUN_FILE, p.name)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
    if sys.platform == "win32":  # which cannot remove an open file
        lock.release(force=True)
    (run / LOCK).unlink(missing_ok=True)
    lock.release(force=True)
    for folder in made:
        with suppress(OSError):  # another process may have started a run there meanwhile
            folder.rmdir()


def resume(
    run: Path, kind: type[Options], build: Build[Options], changes: Mapping[str, Any] | None = None
) -> tuple[Trainer, list[str]]:
    """The trainer of a run at its newest valid checkpoint, and warnings: damaged files, changed versions.

    `changes` are options that are different from here on; they are recorded in run.json.
    """
    ranks = world()
    ranks.silence_stdout()
    with ranks.guard(run, kind.command):
        lock = ranks.run_all_or_raise(lambda: _lock(run) if ranks.writes else None)
        try:
            options, versions_before = ranks.run_all_or_raise(lambda: read_options(run, kind))
            options, changes = ranks.run_all_or_raise(lambda: with_named_engine(options, changes or {}))
            announce(f"reading {run}")
            found = ranks.run_all_or_raise(
                lambda: _newest(run) if ranks.writes else None
            )  # only rank 0 reads and hashes the checkpoints
            name, warnings = ranks.allgather_json(found)[0]
            checkpoint = None if name is None else Path(name)
            step = 0 if checkpoint is None else read_state(checkpoint)["step"]
            was_done = 0 < options.steps <= step
            if changes:
                options = ranks.run_all_or_raise(lambda: change(options, step, changes))
            is_done = 0 < options.steps <= step
            to_build = replace(options, log="none") if is_done else options  # no step is left to log
            ranks.run_all_or_raise(lambda: check_tracker(to_build.log) if ranks.writes else None)
            trainer = ranks.run_all_or_raise(lambda: build(run, to_build, checkpoint))
            trainer.lock = lock
            versions_now = made_with(run, trainer.model)
            keeps = was_done and is_done  # what is given for this call only, as --quiet, is not recorded
            if (checkpoint is None or changes) and not keeps and ranks.writes:
                left = {CHOSEN: [n for n in chosen_in({"made_with": versions_before}) if n not in (changes or {})]}
                versions = (versions_now if checkpoint is None else versions_before) | left
                _record(run, replace(trainer.options, log=options.log), versions)
        except BaseException:
            if lock is not None:
                lock.release(force=True)
            raise
        others = [] if checkpoint is None or is_done else _changes(versions_before, versions_now)
        return trainer, [*warnings, *trainer.warnings, *others]


def with_named_engine(options: Options, values: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options of a run on a user's own pairs, with the file that the user names now; and the other changes.

    A run folder may come from someone else: Python code that run.json names is not run unless the user names it, too.
    """
    if not is_own(options.engine):
        return options, dict(values)
    named: Any = values.get("engine")
    if not is_own(named):
        raise ValueError(
            f"this run trains on pairs of your own, {options.engine}: Python code, which runs only if you name it; add "
            f"--engine {options.engine}"
        )
    return replace(options, engine=named), {name: x for name, x in values.items() if name != "engine"}


def flag(name: str, value: Any = None) -> str:
    """The option of the command line for a field, as it is typed for this value."""
    return f"--{'no-' * (value is False)}{name.replace('_', '-')}"


def change(options: Options, step: int, values: Mapping[str, Any]) -> Options:
    """The options of a run that continues at this step with other values; a ValueError for fixed ones."""
    fixed = sorted(set(values) - set(CHANGEABLE))
    if fixed:
        what = {"texts": "the text", "model": "the model"}.get(fixed[0], flag(fixed[0], values[fixed[0]]))
        raise ValueError(f"{what} cannot change when a run is resumed; what can: {', '.join(map(flag, CHANGEABLE))}")
    if options.dp_clip is not None and {"steps", "batch_size", "accumulate"} & set(values):
        raise ValueError("a private run's number of steps and of examples per step cannot change: ε depends on them")
    for name in ("batch_size", "accumulate"):
        if values.get(name, 1) < 1:
            raise ValueError(f"{name} must be >= 1 when a run is resumed, got {values[name]}")
    if options.command == "finetune" and values.get("lr") == 0:  # where it would be chosen
        raise ValueError("lr must be > 0 when a fine-tune is resumed, got 0")
    steps = values.get("steps", options.steps)
    if steps < step:
        raise ValueError(f"--steps {values['steps']:,} is less than the {step:,} steps that are done")
    ineffective = [n for n, x in values.items() if n not in ("steps", "quiet") and x != getattr(options, n)]
    if 0 < steps == step and ineffective:
        go_on = "start a new run" if options.dp_clip is not None else "add --steps N to go on"
        named = listed([flag(n, values[n]) for n in ineffective])
        raise ValueError(
            f"{named} {'has' if len(ineffective) == 1 else 'have'} no effect: all {step:,} steps of the run are done; "
            f"{go_on}"
        )
    return options.changed(step, **values)


def _lock(run: Path) -> FileLock:
    if not (run / RUN_FILE).is_file():
        raise ValueError(f"{run} is not a run folder: it has no {RUN_FILE}")
    return take_lock(run)


def _record(run: Path, options: TrainingOptions, versions: dict[str, Any]) -> None:
    """Writes run.json: the options, the software versions, and a hash of both."""
    values = {"command": options.command, **asdict(options), "made_with": versions}
    write_json(run / RUN_FILE, {**values, "sha256": _hash(values)})


def read_options(run: Path, kind: type[Options]) -> tuple[Options, dict[str, Any]]:
    """The options and the software versions in run.json."""
    path = run / RUN_FILE
    values = read_json(path)
    options = kind.load(path)
    sha256, versions = values.pop("sha256", None), values.get("made_with")
    if sha256 is not None and sha256 != _hash(values):
        raise ValueError(
            f"{path} has changed since the run started (its SHA-256 differs from the recorded one); restore the "
            f'original, or start a new run. To keep the change, remove the entry "sha256"'
        )
    versions = versions if isinstance(versions, dict) else {}
    return replace(options, **located(vars(options), versions)), versions


def located(values: Mapping[str, Any], versions: Any) -> dict[str, Any]:
    """The options that name files, as they are found from here, else from the folder where the run was started."""
    folder = versions.get(FOLDER) if isinstance(versions, dict) else None
    if not isinstance(folder, str):
        return {}

    def find(name: str) -> str:
        there = Path(folder) / name
        return str(there) if name and not Path(name).exists() and there.exists() else name

    found: dict[str, Any] = {}
    for name in FILES:
        value = values.get(name)
        found |= {name: find(value)} if isinstance(value, str) else {}
        found |= {name: [find(str(one)) for one in value]} if isinstance(value, list) else {}
    return found


def chosen_in(run: Mapping[str, Any]) -> list[str]:
    """The options in the values of a run.json that nobody gave: they were chosen from the data and the model."""
    versions = run.get("made_with")
    names = versions.get(CHOSEN) if isinstance(versions, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _newest(run: Path) -> tuple[str | None, list[str]]:
    checkpoint, warnings = checkpoint_to_resume(run)
    return None if checkpoint is None else str(checkpoint), warnings


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A warning if software versions differ from those that the run started with."""
    files, files_now = before.get("engine_files"), now.get("engine_files")
    own = _changed_files(files, files_now) if isinstance(files, dict) and isinstance(files_now, dict) else []
    apart = (FOLDER, HASHES, "engine_files")
    changed = [name for name in now if name in before and before[name] != now[name] and name not in apart]
    if not changed:
        return own
    old, new = (", ".join(f"{name} {values[name]}" for name in changed) for values in (before, now))
    return [*own, f"this run started with {old} and continues with {new}: results may differ by rounding"]


def _changed_files(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A warning if the files of a user's own pairs differ from those that the run started with, by name and hash."""
    old, new = ({(Path(path).name, sha256) for path, sha256 in files.items()} for files in (before, now))
    changed = sorted({name for name, _ in old ^ new})
    if not changed:
        return []
    return [f"{', '.join(changed)} has changed since this run started: from here on it trains on the new functions"]
