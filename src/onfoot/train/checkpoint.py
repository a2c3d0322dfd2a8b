"""Checkpoints: Hugging Face folders with a trainer/ folder inside, written atomically.

A checkpoint is written under a temporary name, flushed to disk, and renamed; its manifest lists every file with its
size and SHA-256. An interrupted save leaves the earlier checkpoints unchanged. A damaged checkpoint is renamed: it is
not deleted, and does not count towards the number of checkpoints to keep.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onfoot.formats.run_folder import (
    MANIFEST,
    MOMENTS,
    STATE,
    best_of,
    checkpoint_folder,
    checkpoints,
    complaint,
    find_newest,
    known_valid,
    manifest_of,
    read_state,
    stamp,
    step_of,
    validate_once,
)
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.formats.write import flush, write_json

if TYPE_CHECKING:
    from onfoot.train.averaging import WeightAverage
    from onfoot.train.optimizer import AdamW

RAW = "trainer/weights.safetensors"  # the weights that train, where those of the model are their average


def save_checkpoint(
    run: Path,
    write: Callable[[Path], None],
    optimizer: AdamW,
    state: dict[str, Any],
    keep: int,
    keep_every: int = 0,
    average: WeightAverage | None = None,
) -> list[str]:
    """Writes the checkpoint of state["step"]: the files of `write` and the trainer's state.

    If the weights are averaged, the model of the checkpoint has the average, and trainer/ has the weights that train.
    Then removes old checkpoints, except the newest `keep` and those of every `keep_every`-th step. Returns a warning
    for each damaged checkpoint.
    """
    final = checkpoint_folder(run, state["step"])
    with _atomic_folder(final) as folder:
        with nullcontext() if average is None else average.in_model():
            write(folder)
        (folder / "trainer").mkdir()
        if average is not None:
            write_tensors(folder / RAW, average.raw())
        write_tensors(folder / MOMENTS, optimizer.moments())
        write_json(folder / STATE, {**state, "optimizer_steps": optimizer.steps})
        write_json(folder / MANIFEST, manifest_of(folder))
    known_valid[final] = stamp(final)
    warnings = set_aside([(folder, wrong) for folder in checkpoints(run) if (wrong := validate_once(folder))])
    update_symlinks(run, final)
    prune(run, keep, final, keep_every)
    return warnings


def restore_optimizer(folder: Path, optimizer: AdamW) -> None:
    """Loads the optimizer's moments and step count from a checkpoint."""
    try:
        optimizer.restore(TensorFile(folder / MOMENTS), read_state(folder)["optimizer_steps"])
    except ValueError as error:
        raise ValueError(f"{folder / MOMENTS} does not belong to this run: {error}") from None


def restore_average(folder: Path, average: WeightAverage) -> None:
    """Gives a model that has the average of a checkpoint the weights that train."""
    try:
        average.restore(TensorFile(folder / RAW))
    except ValueError as error:
        raise ValueError(f"{folder / RAW} does not belong to this run: {error}") from None


def checkpoint_to_resume(run: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and warnings: damaged newer ones are renamed, and the symlinks updated.

    If there are checkpoints and all are damaged, raises ValueError and changes nothing.
    """
    newest, damaged = find_newest(run)
    if newest is None and damaged:
        problems = "; ".join(complaint(*one) for one in damaged)
        raise ValueError(f"no checkpoint of {run} can be used; restore one, or start a new run: {problems}")
    warnings = set_aside(damaged)
    remove_leftovers(run)
    if newest is not None:
        update_symlinks(run, newest)
    return newest, warnings


def set_aside(damaged: list[tuple[Path, str]]) -> list[str]:
    """Renames damaged checkpoints; returns a warning for each."""
    warnings = []
    for folder, wrong in damaged:
        names = (f"damaged-{folder.name}{more}" for more in ("", *(f"-{n}" for n in range(2, 10**6))))
        aside = next(path for name in names if not (path := folder.with_name(name)).exists())
        folder.rename(aside)
        warnings.append(f"{complaint(folder, wrong)}; renamed to {aside.name}")
    return warnings


def prune(run: Path, keep: int, newest: Path, keep_every: int = 0) -> None:
    """Removes all but the newest `keep` checkpoints, the best one, and those of every `keep_every`-th step."""
    best = best_of(run, newest)
    for folder in checkpoints(run)[:-keep]:
        if folder not in (newest, best) and not (keep_every and step_of(folder) % keep_every == 0):
            _remove(folder)
    remove_leftovers(run)


def remove_leftovers(run: Path) -> None:
    """Removes what an interrupted save or removal has left behind."""
    for pattern in (".writing-*", ".removing-*"):
        for leftover in (run / "checkpoints").glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def update_symlinks(run: Path, newest: Path) -> None:
    """Points `last` and `best` to existing, valid checkpoints."""
    update_symlink(run / "last", newest)
    update_symlink(run / "best", best_of(run, newest))


def update_symlink(link: Path, target: Path) -> None:
    """Points `link` to the target, atomically. Does nothing where the file system has no symbolic links."""
    temporary = link.with_name(f".{link.name}.new")
    if link.is_dir() and not link.is_symlink():  # the run was copied with links followed: this copy is outdated
        shutil.rmtree(link)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        temporary.replace(link)


@contextmanager
def _atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to write to, which becomes the checkpoint on success; on failure nothing is left of it."""
    temporary = final.with_name(f".writing-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        if final.exists():  # the same step written again
            _remove(final)
        temporary.rename(final)
        flush(final.parent)
        flush(final.parent.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ValueError(
            f"cannot write the checkpoint {final}: {error.strerror or error}; earlier checkpoints are intact"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove(folder: Path) -> None:
    """Deletes a checkpoint, renamed first: if interrupted, it must not look like a damaged checkpoint."""
    renamed = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    folder.rename(renamed)
    shutil.rmtree(renamed)
    known_valid.pop(folder, None)
