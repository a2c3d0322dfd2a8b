"""A slice of the campaign `arrays`: mismatched arrays between guard pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")


def test_no_mismatched_call_crashes_or_gives_what_its_formula_does_not() -> None:
    from campaigns import arrays

    outcome = arrays.run(250, seed=15)
    assert outcome.failures == []
    assert outcome.figures["refused"] > 50 < outcome.figures["as the formula"]


def test_one_element_too_far_ends_the_process() -> None:
    code = "from campaigns.guard import empty; import ctypes; x = empty((3,)); ctypes.string_at(x.ctypes.data, {})"
    for size, signal in ((12, 0), (13, -11)):
        done = subprocess.run([sys.executable, "-c", code.format(size)], capture_output=True, text=True)
        assert done.returncode == signal, done.stderr


def test_a_crash_is_reported_with_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process ends in the fourth attempt: the campaign says which call that was, and goes on behind it."""
    from campaigns import arrays

    real, asked = subprocess.run, []

    def ends(command: list[str], **more: Any) -> Any:
        first, last, log = command[-3:]
        asked.append((int(first), int(last)))
        if int(first) > 3:
            return subprocess.CompletedProcess(command, 0, '{"refused": 6}\n', "")
        Path(log).write_text("3 linear_forward: argument 0: cut")
        return subprocess.CompletedProcess(command, -11, "", "")

    monkeypatch.setattr(arrays.subprocess, "run", ends)
    outcome = arrays.run(10, seed=1)
    assert real is not subprocess.run and asked == [(0, 10), (4, 10)]
    assert outcome.failures == ["seed 1, 3 linear_forward: argument 0: cut: the process ended with -11 "]
    assert outcome.figures["crashes"] == 1 and outcome.figures["refused"] == 6
