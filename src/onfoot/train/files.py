"""Writing files of a run folder: never through a symbolic link, atomically, and flushed to disk."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path


def append(path: Path, text: str) -> None:
    """Appends text to a file."""
    with open(path, "a", encoding="utf-8", opener=_open_no_link) as file:
        file.write(text)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a temporary file, then renames it over the old file (or link) of that name."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # "x": fails if someone else has created it meanwhile
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def refuse_link(path: Path) -> None:
    """Raises ValueError if the path is a symbolic link: writing would change its target."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, and its target would be overwritten; remove the link")


def flush(path: Path) -> None:
    """fsync of a file or folder. Windows has no fsync for folders and flushes them by itself."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # Windows flushes only files opened for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_no_link(path: str, flags: int) -> int:
    refuse_link(Path(path))
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(Path(path))
        raise
