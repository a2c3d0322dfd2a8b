"""Reads a run's folder: its checkpoints, which of them are valid, and which has the model to use.

A checkpoint is a Hugging Face folder with a trainer/ folder inside, whose manifest lists every file with its size and
SHA-256. `train.checkpoint` writes them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from onfoot.formats.files import read_json, shown

RUN_FILE = "run.json"
MANIFEST = "trainer/manifest.json"
NAME = re.compile(r"step-\d+")
STATE, MOMENTS = "trainer/state.json", "trainer/optimizer.safetensors"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")  # one of them
Manifest = dict[str, dict[str, Any]]
known_valid: dict[Path, Any] = {}  # checkpoints that this process wrote or checked, with their `stamp` at that time


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint, from its folder's name."""
    return int(folder.name.removeprefix("step-"))


def read_state(folder: Path) -> dict[str, Any]:
    """The saved state of a run: step counts and best loss."""
    state = read_json(folder / STATE)
    for name in ("step", "best_step", "optimizer_steps"):
        if type(state.get(name)) is not int or state[name] < 0:
            raise ValueError(f"{folder / STATE}: {name} must be an integer >= 0, got {shown(state.get(name))}")
    for name in ("best_loss", "seconds"):
        if name in state and type(state[name]) not in (int, float):
            raise ValueError(f"{folder / STATE}: {name} must be a number, got {shown(state[name])}")
    return state


def manifest_of(folder: Path, leave_out: tuple[str, ...] = ()) -> Manifest:
    """Every file of a folder with its size and SHA-256."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in leave_out)
    return {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}


def validate(folder: Path) -> str | None:
    """The reason why a checkpoint is invalid, or None if every file of the manifest exists and is unchanged."""
    try:
        manifest = read_json(folder / MANIFEST)
    except (OSError, ValueError):
        return "it has no readable manifest"
    if not ({STATE, MOMENTS} <= set(manifest) and set(WEIGHTS) & set(manifest)):
        return "its manifest lacks the weights, the optimizer or the state"
    return differs(folder, manifest)


def differs(folder: Path, manifest: Manifest) -> str | None:
    """How the first file that does not match the manifest differs; None if all match."""
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
            return f"its manifest has an invalid entry for {name}"
    return None


def validate_once(folder: Path) -> str | None:
    """Like `validate`, but only compares sizes and times if this process has already checked the files."""
    now = stamp(folder)
    if now is not None and known_valid.get(folder) == now:
        return None
    problem = validate(folder)
    if problem is None:
        known_valid[folder] = now
    return problem


def run_in(folder: Path) -> Path | None:
    """The first thing in a folder that only a run writes: its options, its log or its checkpoints; None if none."""
    return next((path for name in (RUN_FILE, "log.jsonl", "checkpoints") if (path := folder / name).exists()), None)


def checkpoints(run: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first. Unfinished ones have other folder names."""
    folder = run / "checkpoints"
    return sorted((p for p in folder.glob("step-*") if NAME.fullmatch(p.name)), key=step_of)


def newest_valid(run: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and one line per newer invalid one."""
    newest, damaged = find_newest(run)
    return newest, [complaint(*one) for one in damaged]


def find_newest(run: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest valid checkpoint, and the newer invalid ones with their problems."""
    damaged: list[tuple[Path, str]] = []
    for folder in reversed(checkpoints(run)):
        now, problem = stamp(folder), validate(folder)
        if problem is None:
            known_valid[folder] = now
            return folder, damaged
        damaged.append((folder, problem))
    return None, damaged


def complaint(folder: Path, problem: str) -> str:
    return f"{folder} cannot be used: {problem}"


def best_of(run: Path, newest: Path) -> Path:
    """The best checkpoint of a run, as recorded in its newest one; the newest if the best is not valid."""
    best = checkpoint_folder(run, read_state(newest)["best_step"])
    return newest if validate_once(best) else best


def model_folder(path: Path) -> Path:
    """The model folder for a path: for a run its best checkpoint or its last valid one, otherwise the path itself.

    A run of `onfoot train` or `finetune` has a run.json, one of `onfoot.Trainer` only checkpoints.
    """
    is_model = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not (path / RUN_FILE).is_file() and (is_model or not (path / "checkpoints").is_dir()):
        return path
    newest, complaints = newest_valid(path)
    if newest is None:
        raise ValueError(f"the run {path} has no valid checkpoint yet" + "".join(f"; {c}" for c in complaints))
    return best_of(path, newest)


def stamp(folder: Path) -> list[tuple[str, int, int]] | None:
    """Sizes and modification times of a folder's files; while they are unchanged, no new check is needed."""
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
