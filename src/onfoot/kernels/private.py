"""The cache folder of machine code: owned by this user, and not writable by others.

Whoever can write to it could run code in our process. So a folder or file is used only if it belongs to this user, no
other user can write to it, and it is not a symbolic link.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path

import platformdirs

UNUSED = 30  # days after which unused machine code of other sources, compilers and CPUs is removed
LEFT_OVER = 1  # days after which the files of an interrupted compilation are removed
DAY = 86400  # seconds


def cache_home() -> Path:
    """This user's cache folder for onfoot, created if necessary; an OSError if it cannot be used."""
    home = platformdirs.user_cache_path("onfoot", appauthor=False)
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    check_folder(home)
    return home


def check_writable(path: Path) -> None:
    """Raises an OSError if the folder is not writable."""
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write to {path}")


def check_folder(path: Path) -> None:
    """Raises an OSError unless this is a folder of this user that no other user can write to."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a folder, or is a symbolic link")
    _check_owner(path, found)


def read_own(path: Path) -> bytes:
    """The contents of a file of this user that no other user can write to; an OSError for any other."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))

    with open(path, "rb", opener=without_links) as file:
        found = os.fstat(file.fileno())  # of the opened file: it cannot be swapped any more
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a file")
        _check_owner(path, found)
        return file.read()


def write_own(path: Path, data: bytes) -> None:
    """Writes a file that no other user can write to, whatever the umask."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are private by default
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path}; make it private with chmod 700")


def mark_as_used(path: Path) -> None:
    """Updates a folder's modification time, at most once per day."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, if possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_old(home: Path) -> None:
    """Removes machine code that was not used for UNUSED days, and the files of interrupted compilations."""
    for pattern, days in (("kernels-*", UNUSED), ("work-*", LEFT_OVER)):
        for path in home.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > days * DAY:
                    remove(path)
