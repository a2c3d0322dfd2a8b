"""A run's lock: one process at a time opens, trims and writes what is in its folder."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from onfoot.train.files import refuse_link

LOCK = ".lock"
FILES = ("run.json", "log.jsonl", "loss.png", "data.json", "base.json")  # what a run writes beside its folders


def take_lock(run: Path) -> FileLock:
    """The lock of a run, taken; it is free again when it is released, or when this process ends in whatever way."""
    for name in (LOCK, *FILES, *(f"{name}.new" for name in FILES)):
        refuse_link(run / name)
    lock = FileLock(run / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{run} is being trained by another process; wait for it, or stop it first") from None
    return lock
