"""Checkpoints: Hugging Face folders with a trainer/ folder inside, written whole or not at all.

A checkpoint is written under a temporary name, flushed to disk, and renamed; its manifest lists every file with its
size and SHA-256. Whatever interrupts the writing, the checkpoints before it stay as they are.
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

from onfoot.formats.huggingface import read_json
from onfoot.formats.tensors import TensorFile, write_tensors

if TYPE_CHECKING:
    from onfoot.train.optimizer import AdamW

MANIFEST = "trainer/manifest.json"
NAME = re.compile(r"step-(\d+)$")


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def save_checkpoint(
    run: Path, write: Callable[[Path], None], optimizer: AdamW, state: dict[str, Any], keep: int
) -> Path:
    """Writes the checkpoint of state["step"]: what `write` puts there, and the trainer's state beside it."""
    final = checkpoint_folder(run, state["step"])
    with _written_whole(final) as folder:
        write(folder)
        trainer = folder / "trainer"
        trainer.mkdir()
        write_tensors(trainer / "optimizer.safetensors", optimizer.moments())
        (trainer / "state.json").write_text(json.dumps({**state, "optimizer_steps": optimizer.steps}, indent=2) + "\n")
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    point(run / "last", final)
    best = checkpoint_folder(run, state["best_step"])
    point(run / "best", best)
    prune(run, keep, best)
    return final


def restore_optimizer(folder: Path, optimizer: AdamW) -> None:
    """Fills the optimizer's moments and step count from a checkpoint."""
    moments = TensorFile(folder / "trainer" / "optimizer.safetensors")
    optimizer.restore(moments, read_state(folder)["optimizer_steps"])


def read_state(folder: Path) -> dict[str, Any]:
    return read_json(folder / "trainer" / "state.json")


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file of the manifest must be there, whole and unchanged."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return "it has no readable manifest"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {expected['bytes']:,}"
        if _digest(path) != expected["sha256"]:
            return f"{name} is corrupted (its checksum differs)"
    return None


def checkpoints(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first. Folders that were never finished have other names."""
    folder = run / "checkpoints"
    return sorted(
        (p for p in folder.glob("step-*") if NAME.search(p.name)), key=lambda p: int(p.name.removeprefix("step-"))
    )


def newest_sound(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is sound, and a line about each newer one that is not."""
    complaints: list[str] = []
    for folder in reversed(checkpoints(run)):
        wrong = problem(folder)
        if wrong is None:
            return folder, complaints
        complaints.append(f"{folder} cannot be used: {wrong}")
    return None, complaints


def prune(run: Path, keep: int, best: Path) -> None:
    """Removes all but the newest `keep` checkpoints and the best one, and what an interrupted writing left behind."""
    for folder in checkpoints(run)[:-keep]:
        if folder != best:
            shutil.rmtree(folder)
    for leftover in (run / "checkpoints").glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Makes `link` a link to the target, replaced in one step. Where links cannot be made, there is none."""
    temporary = link.with_name(f".{link.name}.new")
    if link.is_dir() and not link.is_symlink():  # a copy of the run that followed the link: what it shows is outdated
        shutil.rmtree(link)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        temporary.replace(link)


def resolve(path: Path) -> Path:
    """The model folder that a path means: itself, or a run's best checkpoint, or its last sound one."""
    if not (path / "run.json").is_file():
        return path
    newest, complaints = newest_sound(path)
    if newest is None:
        raise ValueError(f"the run {path} has no sound checkpoint yet" + "".join(f"; {c}" for c in complaints))
    best = checkpoint_folder(path, read_state(newest)["best_step"])
    return newest if problem(best) else best


@contextmanager
def _written_whole(final: Path) -> Iterator[Path]:
    temporary = final.with_name(f".writing-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        if final.exists():  # the same step written again, by a run that was resumed from before it
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(final.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ValueError(
            f"the checkpoint {final} could not be written ({error.strerror or error}); the ones before it are intact"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
