"""Errors on the command line: one line each, and nothing if the reader has closed the pipe."""

from __future__ import annotations

import errno

import pytest
from typer.testing import CliRunner

from onfoot.cli import app


def raising(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("onfoot.cli.table.preset", fail)
    monkeypatch.delenv("ONFOOT_DEBUG", raising=False)
    result = CliRunner().invoke(app, ["table"])
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "error: two lines\n"),
        (ValueError(), "error: ValueError\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "error: /x: No space left on device\n"),
        (MemoryError("9 GB"), "error: not enough memory (9 GB); choose smaller sizes\n"),
    ],
    ids=repr,
)
def test_user_errors_are_one_line_with_status_2(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert raising(error, monkeypatch) == (2, line)


def test_a_closed_pipe_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    status, stderr = raising(BrokenPipeError(errno.EPIPE, "Broken pipe"), monkeypatch)
    assert status == 1 and stderr == ""
