"""Hashes of what a run depends on but does not store (base model and data), and its software versions."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import onfoot
from onfoot.arrays import to_numpy
from onfoot.formats.files import read_json
from onfoot.formats.write import write_json
from onfoot.models.model import Model
from onfoot.own_engine import OwnEngine
from onfoot.quantized import frozen_weight
from onfoot.recording.pool import threads
from onfoot.train.parallel import world

FOLDER, HASHES, CHOSEN = "folder", "fingerprints", "chosen"


def fingerprint(model: Model) -> str:
    """SHA-256 of a model's configuration and parameters."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, value in sorted(model.params.items()):
        digest.update(f"{name} {tuple(value.shape)};".encode())
        frozen = frozen_weight(value)
        parts = [to_numpy(value)] if frozen is None else frozen.arrays
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def record_or_verify(path: Path, sha256: str, what: str) -> None:
    """Writes a hash of what a run depends on (rank 0, first call), or raises ValueError if it has changed.

    With other data or another base model, a resumed run would not continue as the original would have.
    """
    ranks = world()

    def verify() -> None:
        if read_json(path).get("sha256") != sha256:
            raise ValueError(
                f"{what} has changed since the run started (its SHA-256 differs from {path}); restore the original, or "
                f"start a new run"
            )

    def record() -> None:
        write_json(path, {"sha256": sha256})

    ranks.rank0_first(
        lambda: verify() if path.is_file() else record(),
        lambda: (ranks.wait_for_path(path), verify())[1],  # type: ignore[func-returns-value]
    )


def made_with(run: Path, model: Model) -> dict[str, Any]:
    """The software versions and the engine of a run (with others, results may differ by rounding), and fingerprints.

    The folder it was started in is for finding its files again if it is resumed elsewhere. For an engine of the user's
    own, `engine_files` has the SHA-256 of each of its files.
    """
    own = {"engine_files": model.engine.files} if isinstance(model.engine, OwnEngine) else {}
    return {
        FOLDER: str(Path.cwd()),
        "onfoot": onfoot.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": _version("numba"),
        "tokenizers": _version("tokenizers"),
        **({"torch": _version("torch")} if model.engine.name == "torch" else {}),
        "engine": model.engine.name,
        "threads": str(threads()),
        HASHES: fingerprints(run, model),
        **own,
    }


def fingerprints(run: Path, model: Model) -> dict[str, str]:
    """The SHA-256 of what a run was made from: its base model, if it has one, its data, and its tokenizer.json."""
    files = {"base": run / "base.json", "data": run / "data.json"}
    out = {name: str(read_json(path).get("sha256")) for name, path in files.items() if path.is_file()}
    if model.tokenizer is not None:
        out["tokenizer"] = hashlib.sha256(model.tokenizer.to_json().encode()).hexdigest()
    return out


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
