"""The lock of a run folder: only one process at a time reads, trims and writes it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from onfoot.formats.write import refuse_link

LOCK = ".lock"
FILES = ("run.json", "log.jsonl", "loss.png", "data.json", "base.json")  # the files that a run writes into its folder


def refuse_while_training(run: Path) -> None:
    """Raises ValueError if another process is training the run. Writes nothing."""
    with suppress(OSError):  # a folder that cannot be written to is not being trained by this user
        if (run / LOCK).is_file():
            take_lock(run).release()


def take_lock(run: Path) -> FileLock:
    """Acquires the lock of a run. It is freed by release(), or when this process ends for any reason."""
    for name in (LOCK, *FILES, *(f".{name}.new" for name in FILES)):
        refuse_link(run / name)
    lock = FileLock(run / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{run} is being trained by another process; wait for it, or stop it first") from None
    return lock
