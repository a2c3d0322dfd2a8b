"""docs/learn.md shows what the commands really print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from learners import edit
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.learn import EXERCISES
from onfoot.learn.course import COURSE

GUIDE = (Path(__file__).parents[2] / "docs" / "learn.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
(GIVEN,) = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)


def shows(console: str) -> None:
    command, *shown = console.splitlines()
    result = CliRunner().invoke(app, command.removeprefix("$ onfoot ").split())
    for part in re.split(r"^\.\.\.$", "\n".join(shown), flags=re.MULTILINE):
        assert part.strip("\n") in result.stdout


def test_the_exercise_of_the_guide_goes_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, unsolved, wrong, solved = CONSOLE
    shows(make)
    monkeypatch.chdir(tmp_path / "onfoot-learn")
    assert GIVEN in Path("e01_linear.py").read_text(encoding="utf-8")
    shows(unsolved)
    for line in PYTHON[0].splitlines():
        name = line.split()[0]
        edit(Path("e01_linear.py"), next(one for one in GIVEN.splitlines() if one.startswith(f"    {name} = ")), line)
    shows(wrong)
    edit(Path("e01_linear.py"), ".mean(axis=0)", ".sum(axis=0)")
    shows(solved)


def test_the_example_for_teachers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[1], "learn.md", "exec"), {})
    assert (tmp_path / "solutions" / "e19_tangents.py").is_file()


def test_the_guide_lists_every_exercise_and_command() -> None:
    for exercise in EXERCISES:
        assert f"| {exercise.number} | {exercise.title} |" in GUIDE
    assert f"{len(EXERCISES)} exercises" in GUIDE
    welcome = (COURSE / "README.md").read_text(encoding="utf-8")
    for command in ("check", "hint", "map", "show"):
        assert f"`onfoot learn {command}" in GUIDE and f"`onfoot learn {command}" in welcome
