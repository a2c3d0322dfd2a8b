"""What a run depends on and does not keep: its base, its data, and what it was computed with."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path

import numpy as np

import onfoot
from onfoot.arrays import to_numpy
from onfoot.formats.files import read_json
from onfoot.formats.huggingface import write_json
from onfoot.models.model import Model
from onfoot.quantized import QuantizedWeight, Transposed
from onfoot.train.files import flush
from onfoot.train.parallel import world


def fingerprint(model: Model) -> str:
    """A hash of a model's configuration and of every bit of its parameters."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, value in sorted(model.params.items()):
        digest.update(f"{name} {tuple(value.shape)};".encode())
        if isinstance(value, QuantizedWeight | Transposed):
            blocks: QuantizedWeight = value if isinstance(value, QuantizedWeight) else value.T
            parts = [blocks.codes, blocks.scale, *([] if blocks.minimum is None else [blocks.minimum])]
        else:
            parts = [to_numpy(value)]
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def remember(path: Path, sha256: str, what: str) -> None:
    """Notes down a hash of what a run depends on, on rank 0; all ranks refuse what is not the same.

    If it has changed since the run was begun, the run cannot go on to the same end.
    """
    ranks = world()

    def check() -> None:
        if read_json(path).get("sha256") != sha256:
            raise ValueError(
                f"{what} has changed since the run was begun (its SHA-256 is not the one in {path}); put back what was "
                f"there, or begin a new run"
            )

    def note() -> None:
        write_json(path, {"sha256": sha256})
        flush(path)
        flush(path.parent)

    ranks.rank0_first(
        lambda: check() if path.is_file() else note(),
        lambda: (ranks.wait_for_path(path), check())[1],  # type: ignore[func-returns-value]
    )


def made_with(model: Model) -> dict[str, str | None]:
    """What a run is computed with: another version, or another engine, may round in another way."""
    return {
        "onfoot": onfoot.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": _version("numba"),
        "engine": model.engine.name,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
