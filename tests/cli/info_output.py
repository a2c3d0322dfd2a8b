"""Runs `onfoot info` and reads its output, for the tests."""

from __future__ import annotations

import re
from typing import Any

from typer.testing import CliRunner

from onfoot.cli import app


def info(*arguments: Any) -> str:
    """The output of `onfoot info`, which must succeed."""
    result = CliRunner().invoke(app, ["info", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def row(output: str, name: str) -> str:
    """The value in the row with this name."""
    found = re.search(rf"^{re.escape(name)} {{2,}}(.*)$", output, flags=re.MULTILINE)
    assert found, f"no row {name!r} in\n{output}"
    return found[1].strip()
