"""Files of a run's folder: never written through a link, whole or not at all, and flushed to disk."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path


def append(path: Path, text: str) -> None:
    """Adds text at the end of a file."""
    with open(path, "a", encoding="utf-8", opener=_no_link) as file:
        file.write(text)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that takes the place of the old one, or of a link of that name, once it is whole."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # a new file, and nothing that somebody has put there
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def refuse_link(path: Path) -> None:
    """Refuses to touch what a link of this name points to."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, and what it points to would be overwritten; remove it")


def flush(path: Path) -> None:
    """Until a file, or the names in a folder, are on the disk. Windows flushes names by itself, and cannot be asked."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # Windows flushes what may be written only
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_link(path: str, flags: int) -> int:
    refuse_link(Path(path))
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(Path(path))
        raise
