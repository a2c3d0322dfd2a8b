"""What the frame of the command line does with errors: one line each, and nothing where a reader has gone."""

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
def test_what_users_can_mend_is_one_line_and_status_2(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert raising(error, monkeypatch) == (2, line)


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = raising(BrokenPipeError(errno.EPIPE, "Broken pipe"), monkeypatch)
    assert status == 1 and said == ""
