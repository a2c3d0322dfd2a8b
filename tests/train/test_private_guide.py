"""The guide to private training: its files and commands, as they stand on the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "private.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", "").splitlines()
    if line.startswith(("python", "onfoot"))
]


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PYTHON[-1], {})
    assert capsys.readouterr().out == "(8,)\nTrue\n"


@pytest.mark.slow
def test_the_worked_example_learns_the_drugs_and_keeps_the_pins(tmp_path: Path) -> None:
    for code in PYTHON[:-1]:
        (tmp_path / code.split()[1]).write_text(code, encoding="utf-8")
    assert len(COMMANDS) == 5
    out = ""
    for line in COMMANDS:
        words = shlex.split(line)
        start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "onfoot"]
        done = subprocess.run([*start, *words[1:]], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    found = {
        run: (int(drugs), int(pins))
        for run, drugs, pins in re.findall(r"^(\w+): the drugs of (\d+) .* the pins of (\d+) ", out, re.MULTILINE)
    }
    assert found["plain"][0] > 180 and found["plain"][1] > 20
    assert found["private"][0] > 150 and found["private"][1] < 4
