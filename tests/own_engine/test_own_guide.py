"""The guide to one's own engine: its file, its commands and its code, as they stand on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.own_engine.pairs import GRADIENTS, PAIRS

PAGE = (Path(__file__).parents[2] / "docs" / "own_engine.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^```console\n\$ onfoot (.*?)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_file_the_commands_and_the_code_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, code = CODE
    wrong, right = COMMANDS
    (tmp_path / "my_ops.py").write_text(file, encoding="utf-8")
    shows(*wrong, code=2)
    assert "drows.mean(axis=0)" in file and "`drows.sum(axis=0)`" in PAGE
    (tmp_path / "my_ops.py").write_text(file.replace("drows.mean(axis=0)", "drows.sum(axis=0)"), encoding="utf-8")
    shows(*right, code=0)
    names: dict[str, Any] = {}
    exec(code, names)
    assert "frozenset({'linear'})" in capsys.readouterr().out
    assert names["model"].pairs_used()["linear"] and not names["model"].pairs_used()["attention"]


def shows(command: str, output: str, code: int) -> None:
    """Runs a command, whose output has all lines of the page."""
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == code, result.output
    said = " ".join(result.output.split())
    for line in output.splitlines():
        assert line == "..." or line in said


def test_the_guide_has_every_pair_with_its_gradients() -> None:
    table = [row.split("|") for row in PAGE.splitlines() if row.startswith("| `")]
    rows = {name: cells[3] for cells in table for name in re.findall(r"`(\w+)`", cells[1])}
    assert set(PAIRS) == set(rows)
    for pair, arguments in GRADIENTS.items():
        found = [f"d{name}" for name in arguments]
        assert re.findall(r"\bd[a-z]+\b", rows[pair])[: len(found)] == found, pair
