"""The folder that machine code is kept in: ours, and nobody else's to write.

Whoever can write to it could run code in our process. So a folder or file counts only where it belongs to this user,
no other may write to it, and no link stands in its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path

import platformdirs

UNUSED = 30  # days after which the machine code of other sources, compilers and CPUs is removed
LEFT_OVER = 1  # days after which what an interrupted compilation has left is removed
DAY = 86400  # seconds


def cache_home() -> Path:
    """This user's cache folder for onfoot, which is made if need be; an OSError that says why it cannot be used."""
    home = platformdirs.user_cache_path("onfoot", appauthor=False)
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    check_folder(home)
    return home


def check_writable(path: Path) -> None:
    """An OSError where nothing can be added to a folder."""
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written")


def check_folder(path: Path) -> None:
    """An OSError unless this is a folder of this user that no other may write to."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a folder, or a link to one")
    _check_owner(path, found)


def read_own(path: Path) -> bytes:
    """What is in a file of this user that no other may write to; an OSError for any other."""

    def without_links(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))

    with open(path, "rb", opener=without_links) as file:
        found = os.fstat(file.fileno())  # of what was opened: nobody can exchange it any more
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a file")
        _check_owner(path, found)
        return file.read()


def write_own(path: Path, data: bytes) -> None:
    """Writes a file that no other user may write to, whatever the umask."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are private by themselves
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (number {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {path} (chmod 700 makes it private)")


def mark_as_used(path: Path) -> None:
    """Notes that a folder is in use, once a day."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, where that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_old(home: Path) -> None:
    """Removes machine code that nobody has used for UNUSED days, and what interrupted compilations have left."""
    for pattern, days in (("kernels-*", UNUSED), ("work-*", LEFT_OVER)):
        for path in home.glob(pattern):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > days * DAY:
                    remove(path)
