"""The contents of a folder of machine code, with checksums."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from onfoot.kernels.private import check_folder, read_own, write_own

MANIFEST = "manifest"


class Code(NamedTuple):
    """The contents of a folder. Kernels have names such as "linear.sum_rows", files such as "linear"."""

    objects: dict[str, bytes]
    errors: dict[str, str]  # kernel -> why it does not compile
    refused: dict[str, str]  # file -> its error against the formula, or the refused file that it imports
    slower: float  # a step's time relative to NumPy, if that was measured; otherwise 0


def read(folder: Path) -> Code:
    """Reads a folder; an OSError or ValueError if it was changed, or is not owned by this user."""
    check_folder(folder)
    checksum, _, text = read_own(folder / MANIFEST).decode().partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != checksum:
        raise ValueError(f"checksum mismatch in {MANIFEST}")
    manifest = json.loads(text)
    objects = {name: read_own(folder / f"{name}.o") for name in manifest["objects"]}
    for name, known in manifest["objects"].items():
        if hashlib.sha256(objects[name]).hexdigest() != known:
            raise ValueError(f"checksum mismatch in {name}.o")
    return Code(objects, manifest["errors"], manifest["refused"], manifest["slower"])


def write(folder: Path, code: Code) -> None:
    """Writes the manifest of a folder; without it, the folder is not valid."""
    objects = {name: hashlib.sha256(data).hexdigest() for name, data in code.objects.items()}
    text = json.dumps({**code._asdict(), "objects": objects}, indent=1)
    part = folder / f"{MANIFEST}.part"
    write_own(part, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())
    part.replace(folder / MANIFEST)
