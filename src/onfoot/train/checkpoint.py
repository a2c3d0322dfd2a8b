"""Checkpoints: Hugging Face folders with a trainer/ folder inside, written whole or not at all.

A checkpoint is written under a temporary name, flushed to disk, and renamed; its manifest lists every file with its
size and SHA-256. Whatever interrupts the writing, the checkpoints before it stay as they are. One that is found damaged
is set aside under another name: it is not deleted, and not counted among those that are kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    validate_once,
)
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.train.files import flush

if TYPE_CHECKING:
    from onfoot.train.optimizer import AdamW


def save_checkpoint(
    run: Path, write: Callable[[Path], None], optimizer: AdamW, state: dict[str, Any], keep: int
) -> list[str]:
    """Writes the checkpoint of state["step"]: what `write` puts there, and the trainer's state beside it.

    Then there are as many as are to be kept. What is returned is a line about each that was found damaged.
    """
    final = checkpoint_folder(run, state["step"])
    with _written_whole(final) as folder:
        write(folder)
        (folder / "trainer").mkdir()
        write_tensors(folder / MOMENTS, optimizer.moments())
        (folder / STATE).write_text(json.dumps({**state, "optimizer_steps": optimizer.steps}, indent=2) + "\n")
        (folder / MANIFEST).write_text(json.dumps(manifest_of(folder), indent=2) + "\n")
    known_valid[final] = stamp(final)
    said = set_aside([(folder, wrong) for folder in checkpoints(run) if (wrong := validate_once(folder))])
    update_symlinks(run, final)
    prune(run, keep, final)
    return said


def restore_optimizer(folder: Path, optimizer: AdamW) -> None:
    """Fills the optimizer's moments and step count from a checkpoint."""
    try:
        optimizer.restore(TensorFile(folder / MOMENTS), read_state(folder)["optimizer_steps"])
    except ValueError as error:
        raise ValueError(f"{folder / MOMENTS} does not belong to this run: {error}") from None


def go_back(run: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, to go on from: newer ones are set aside, and the links show what there is.

    Where there are checkpoints and none can be used, nothing is touched.
    """
    newest, damaged = find_newest(run)
    if newest is None and damaged:
        complaints = "; ".join(complaint(*one) for one in damaged)
        raise ValueError(f"no checkpoint of {run} can be used; put one back, or begin a new run: {complaints}")
    said = set_aside(damaged)
    sweep(run)
    if newest is not None:
        update_symlinks(run, newest)
    return newest, said


def set_aside(damaged: list[tuple[Path, str]]) -> list[str]:
    """Gives damaged checkpoints other names; a line about each."""
    said = []
    for folder, wrong in damaged:
        names = (f"damaged-{folder.name}{more}" for more in ("", *(f"-{n}" for n in range(2, 10**6))))
        aside = next(path for name in names if not (path := folder.with_name(name)).exists())
        folder.rename(aside)
        said.append(f"{complaint(folder, wrong)}; it is set aside as {aside.name}")
    return said


def prune(run: Path, keep: int, newest: Path) -> None:
    """Removes all but the newest `keep` checkpoints and the best one."""
    best = best_of(run, newest)
    for folder in checkpoints(run)[:-keep]:
        if folder not in (newest, best):
            _remove(folder)
    sweep(run)


def sweep(run: Path) -> None:
    """Removes what an interrupted writing or removing has left behind."""
    for pattern in (".writing-*", ".removing-*"):
        for leftover in (run / "checkpoints").glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def update_symlinks(run: Path, newest: Path) -> None:
    """Lets `last` and `best` point to checkpoints that are there and sound."""
    update_symlink(run / "last", newest)
    update_symlink(run / "best", best_of(run, newest))


def update_symlink(link: Path, target: Path) -> None:
    """Makes `link` a link to the target, replaced in one step. Where links cannot be made, there is none."""
    temporary = link.with_name(f".{link.name}.new")
    if link.is_dir() and not link.is_symlink():  # a copy of the run that followed the link: what it shows is outdated
        shutil.rmtree(link)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        temporary.replace(link)


@contextmanager
def _written_whole(final: Path) -> Iterator[Path]:
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
            f"the checkpoint {final} could not be written ({error.strerror or error}); the ones before it are intact"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove(folder: Path) -> None:
    """Deletes a checkpoint, under another name: what is half deleted must not look like a damaged one."""
    going = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(going, ignore_errors=True)
    folder.rename(going)
    shutil.rmtree(going)
    known_valid.pop(folder, None)
