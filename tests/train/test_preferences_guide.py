"""The guide to preference tuning: its files, commands and lines of data, as they stand on the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from onfoot.data.preferences import read_preferences
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "preferences.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PYTHON[-1], {})
    assert capsys.readouterr().out == "True\n"


def test_the_lines_of_data_can_be_read(tmp_path: Path) -> None:
    (lines,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "pairs.jsonl").write_text(lines)
    plain, explicit, implicit = read_preferences([tmp_path / "pairs.jsonl"], byte_tokenizer(), ChatTemplate())
    assert (explicit[1].ids == implicit[1].ids).all() and len(plain[0]) < len(plain[1])


@pytest.mark.slow
def test_the_worked_example_prefers_digits(tmp_path: Path) -> None:
    for code in PYTHON[:-1]:
        (tmp_path / code.split()[1]).write_text(code, encoding="utf-8")
    assert len(COMMANDS) == 4
    out = ""
    for line in COMMANDS:
        words = shlex.split(line)
        start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "onfoot"]
        done = subprocess.run([*start, *words[1:]], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    base, tuned = (int(n) for n in re.findall(r": (\d+) of 20 answers in digits", out))
    assert base < 16 and tuned > 18
