"""Writing files: atomically, flushed to disk, and never through a symbolic link."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces the old file (or link) of that name on success.

    It is on disk when the context ends. On failure the old file is unchanged.
    """
    final = Path(path)
    temporary = final.with_name(f".{final.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:  # "x": fails if someone else has created it meanwhile
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(final.parent)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text in UTF-8 atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: str | Path, values: Any) -> None:
    """Writes a value as JSON atomically, indented and with a final newline."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def append(path: Path, text: str) -> None:
    """Appends text to a file."""
    with open(path, "a", encoding="utf-8", opener=_open_no_link) as file:
        file.write(text)


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
