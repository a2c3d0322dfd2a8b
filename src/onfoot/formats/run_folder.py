"""A run's folder as others read it: which checkpoints it has, which of them are valid, and where the model is.

A checkpoint is a Hugging Face folder with a trainer/ folder inside, whose manifest lists every file with its size and
SHA-256. `train.checkpoint` writes them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from onfoot.formats.files import read_json, shown

MANIFEST = "trainer/manifest.json"
NAME = re.compile(r"step-\d+")
STATE, MOMENTS = "trainer/state.json", "trainer/optimizer.safetensors"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")  # one of them
Manifest = dict[str, dict[str, Any]]
known_valid: dict[Path, Any] = {}  # the checkpoints that this process has written or checked, each as it was then


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


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
    return {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}


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
            if _sha256(path) != expected["sha256"]:
                return f"{name} is corrupted (its checksum differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        except (KeyError, TypeError, ValueError):
            return f"its manifest's entry for {name} is not one"
    return None


def validate_once(folder: Path) -> str | None:
    """The same for a checkpoint that this process may have checked before: then only sizes and times are compared."""
    now = stamp(folder)
    if now is not None and known_valid.get(folder) == now:
        return None
    wrong = validate(folder)
    if wrong is None:
        known_valid[folder] = now
    return wrong


def checkpoints(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first. Folders that were never finished have other names."""
    folder = run / "checkpoints"
    return sorted(
        (p for p in folder.glob("step-*") if NAME.fullmatch(p.name)), key=lambda p: int(p.name.removeprefix("step-"))
    )


def newest_valid(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is sound, and a line about each newer one that is not."""
    newest, damaged = find_newest(run)
    return newest, [complaint(*one) for one in damaged]


def find_newest(run: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest sound checkpoint, and newer ones with what is wrong with each."""
    damaged: list[tuple[Path, str]] = []
    for folder in reversed(checkpoints(run)):
        now, wrong = stamp(folder), validate(folder)
        if wrong is None:
            known_valid[folder] = now
            return folder, damaged
        damaged.append((folder, wrong))
    return None, damaged


def complaint(folder: Path, wrong: str) -> str:
    return f"{folder} cannot be used: {wrong}"


def best_of(run: Path, newest: Path) -> Path:
    """The best checkpoint that a run has: the one that its newest names, or the newest itself if that is not sound."""
    best = checkpoint_folder(run, read_state(newest)["best_step"])
    return newest if validate_once(best) else best


def model_folder(path: Path) -> Path:
    """The model folder that a path means: itself, or a run's best checkpoint, or its last sound one."""
    if not (path / "run.json").is_file():
        return path
    newest, complaints = newest_valid(path)
    if newest is None:
        raise ValueError(f"the run {path} has no sound checkpoint yet" + "".join(f"; {c}" for c in complaints))
    return best_of(path, newest)


def stamp(folder: Path) -> list[tuple[str, int, int]] | None:
    """Sizes and times of a folder's files: as long as they stay the same, a check need not be repeated."""
    try:
        return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()]
    except OSError:
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
