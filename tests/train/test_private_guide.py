"""The guide to private training: its files and commands, as they stand on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import run_page


def test_the_example_in_python_runs(tmp_path: Path) -> None:
    assert run_page("docs/private.md", tmp_path).printed[-1] == "(8,)\nTrue\n"


@pytest.mark.slow
def test_the_worked_example_learns_the_drugs_and_keeps_the_pins(tmp_path: Path) -> None:
    out = "".join(run_page("docs/private.md", tmp_path, slow=True).printed)
    found = {
        run: (int(drugs), int(pins))
        for run, drugs, pins in re.findall(r"^(\w+): the drugs of (\d+) .* the pins of (\d+) ", out, re.MULTILINE)
    }
    assert found["plain"][0] > 180 and found["plain"][1] > 20
    assert found["private"][0] > 150 and found["private"][1] < 4
