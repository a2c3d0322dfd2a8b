"""Runs a learner's file in a process of its own, as `onfoot check` does, with an adapter in front of it."""

from __future__ import annotations

from pathlib import Path

from onfoot.check.isolated import TIMEOUT, IsolatedFunction

# No bytecode is written: a file that is changed twice within a second would be loaded as it was before.
START = (
    "import sys; sys.dont_write_bytecode = True; sys.path[:] = [p for p in sys.path if p]; "
    "sys.path.append(sys.argv[1]); from onfoot.check.worker import main; from onfoot.learn.adapters import load; "
    "main(*sys.argv[2:], load)"
)


class IsolatedExercise(IsolatedFunction):
    """The function of a part of an exercise, in another process."""

    code = START

    def __init__(self, path: Path, adapter: str, timeout: float = TIMEOUT) -> None:
        super().__init__(str(path), adapter, timeout)
