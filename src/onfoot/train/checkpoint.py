"""Checkpoints: Hugging Face folders with a trainer/ folder inside, written whole or not at all.

A checkpoint is written under a temporary name, flushed to disk, and renamed; its manifest lists every file with its
size and SHA-256. Whatever interrupts the writing, the checkpoints before it stay as they are. One that is found damaged
is set aside under another name: it is not deleted, and not counted among those that are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onfoot.formats.files import read_json, shown
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.train.files import flush

if TYPE_CHECKING:
    from onfoot.train.optimizer import AdamW

MANIFEST = "trainer/manifest.json"
NAME = re.compile(r"step-\d+")
STATE, MOMENTS = "trainer/state.json", "trainer/optimizer.safetensors"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")  # one of them
Manifest = dict[str, dict[str, Any]]
_sound: dict[Path, Any] = {}  # the checkpoints that this process has written or checked, each as it was then


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


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
    _sound[final] = _stamp(final)
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


def read_state(folder: Path) -> dict[str, Any]:
    """Where a run stood: numbers of steps, and the best loss."""
    state = read_json(folder / STATE)
    for name in ("step", "best_step", "optimizer_steps"):
        if type(state.get(name)) is not int or state[name] < 0:
            raise ValueError(f"{folder / STATE}: {name}={shown(state.get(name))} is not a number of steps")
    for name in ("best_loss", "seconds"):
        if name in state and type(state[name]) not in (int, float):
            raise ValueError(f"{folder / STATE}: {name}={shown(state[name])} is not a number")
    return state


def manifest_of(folder: Path, leave_out: tuple[str, ...] = ()) -> Manifest:
    """Every file of a folder with its size and SHA-256."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in leave_out)
    return {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}


def validate(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file of the manifest must be there, whole and unchanged."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return "it has no readable manifest"
    if not ({STATE, MOMENTS} <= set(manifest) and set(WEIGHTS) & set(manifest)):
        return "its manifest lacks the weights, the optimizer or the state"
    return differs(folder, manifest)


def differs(folder: Path, manifest: Manifest) -> str | None:
    """The first file that is not as the manifest has it, and in what; None where all are."""
    for name, expected in manifest.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
            if _digest(path) != expected["sha256"]:
                return f"{name} is corrupted (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        except (KeyError, TypeError, ValueError):
            return f"its manifest's entry for {name} is not one"
    return None


def validate_once(folder: Path) -> str | None:
    """The same for a checkpoint that this process may have checked before: then only sizes and times are compared."""
    stamp = _stamp(folder)
    if stamp is not None and _sound.get(folder) == stamp:
        return None
    wrong = validate(folder)
    if wrong is None:
        _sound[folder] = stamp
    return wrong


def checkpoints(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first. Folders that were never finished have other names."""
    folder = run / "checkpoints"
    return sorted(
        (p for p in folder.glob("step-*") if NAME.fullmatch(p.name)), key=lambda p: int(p.name.removeprefix("step-"))
    )


def newest_valid(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is sound, and a line about each newer one that is not."""
    newest, damaged = _find(run)
    return newest, [_complaint(*one) for one in damaged]


def go_back(run: Path) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, to go on from: newer ones are set aside, and the links show what there is.

    Where there are checkpoints and none can be used, nothing is touched.
    """
    newest, damaged = _find(run)
    if newest is None and damaged:
        complaints = "; ".join(_complaint(*one) for one in damaged)
        raise ValueError(f"no checkpoint of {run} can be used; put one back, or begin a new run: {complaints}")
    said = set_aside(damaged)
    sweep(run)
    if newest is not None:
        update_symlinks(run, newest)
    return newest, said


def _find(run: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest sound checkpoint, and newer ones with what is wrong with each."""
    damaged: list[tuple[Path, str]] = []
    for folder in reversed(checkpoints(run)):
        stamp, wrong = _stamp(folder), validate(folder)
        if wrong is None:
            _sound[folder] = stamp
            return folder, damaged
        damaged.append((folder, wrong))
    return None, damaged


def _complaint(folder: Path, wrong: str) -> str:
    return f"{folder} cannot be used: {wrong}"


def set_aside(damaged: list[tuple[Path, str]]) -> list[str]:
    """Gives damaged checkpoints other names; a line about each."""
    said = []
    for folder, wrong in damaged:
        names = (f"damaged-{folder.name}{more}" for more in ("", *(f"-{n}" for n in range(2, 10**6))))
        aside = next(path for name in names if not (path := folder.with_name(name)).exists())
        folder.rename(aside)
        said.append(f"{_complaint(folder, wrong)}; it is set aside as {aside.name}")
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


def best_of(run: Path, newest: Path) -> Path:
    """The best checkpoint that a run has: the one that its newest names, or the newest itself if that is not sound."""
    best = checkpoint_folder(run, read_state(newest)["best_step"])
    return newest if validate_once(best) else best


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


def model_folder(path: Path) -> Path:
    """The model folder that a path means: itself, or a run's best checkpoint, or its last sound one."""
    if not (path / "run.json").is_file():
        return path
    newest, complaints = newest_valid(path)
    if newest is None:
        raise ValueError(f"the run {path} has no sound checkpoint yet" + "".join(f"; {c}" for c in complaints))
    return best_of(path, newest)


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
    _sound.pop(folder, None)


def _stamp(folder: Path) -> list[tuple[str, int, int]] | None:
    """Sizes and times of a folder's files: as long as they stay the same, a check need not be repeated."""
    try:
        return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()]
    except OSError:
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
