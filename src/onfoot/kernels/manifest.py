"""What a folder of machine code holds, and the checksums that say whether it still does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from onfoot.kernels.private import check_folder, read_own, write_own

MANIFEST = "manifest"


class Code(NamedTuple):
    """What a folder holds. Kernels go by names such as "linear.sum_rows", files by "linear"."""

    objects: dict[str, bytes]
    errors: dict[str, str]  # kernel -> why it does not compile
    refused: dict[str, str]  # file -> how far it is from its formula, or what it builds on that is refused
    slower: float  # how many times as long as NumPy a step takes, where that was in doubt; otherwise 0


def read(folder: Path) -> Code:
    """What a folder holds; an OSError or ValueError where it is not as it was written, and by us."""
    check_folder(folder)
    checksum, _, text = read_own(folder / MANIFEST).decode().partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != checksum:
        raise ValueError(f"{MANIFEST} has another checksum")
    manifest = json.loads(text)
    objects = {name: read_own(folder / f"{name}.o") for name in manifest["objects"]}
    for name, known in manifest["objects"].items():
        if hashlib.sha256(objects[name]).hexdigest() != known:
            raise ValueError(f"{name}.o has another checksum")
    return Code(objects, manifest["errors"], manifest["refused"], manifest["slower"])


def write(folder: Path, code: Code) -> None:
    """Says what a folder holds: what is in it before counts for nothing."""
    objects = {name: hashlib.sha256(data).hexdigest() for name, data in code.objects.items()}
    text = json.dumps({**code._asdict(), "objects": objects}, indent=1)
    part = folder / f"{MANIFEST}.part"
    write_own(part, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())
    part.replace(folder / MANIFEST)
