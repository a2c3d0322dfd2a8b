"""The teacher's guide: its example runs, its options exist, and the template of an exercise works as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from learners import edit
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.learn.template import write_template
from pages import run_page

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "teaching.md").read_text(encoding="utf-8")


def test_the_example_of_the_guide_is_solved(tmp_path: Path) -> None:
    assert run_page("docs/teaching.md", tmp_path).printed[-2].startswith("Solved: linear_backward")


def test_every_option_and_status_of_the_guide_exists() -> None:
    grading = GUIDE.split("## Grading")[1].split("## What the isolation does")[0]
    said = CliRunner().invoke(app, ["learn", "grade", "--help"], env={"COLUMNS": "200"}).output
    options = set(re.findall(r"--[a-z]+", re.sub(r"<!--.*?-->", "", grading, flags=re.DOTALL)))
    assert len(options) > 10 and {option for option in options if option not in said} == set()
    made = CliRunner().invoke(app, ["learn", "make", "--help"], env={"COLUMNS": "200"}).output
    assert all(option in made for option in ("--with-solutions", "--notebooks", "--nbgrader"))
    from onfoot.learn.grade_report import WORDS

    assert [status for status in WORDS if status not in grading] == []


def checked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "check_e42_conv.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")


def test_a_new_exercise_is_unsolved_and_its_solution_right_and_a_mistake_found(tmp_path: Path) -> None:
    command = ["learn", "new", "conv", "--number", "42", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "e42_conv.py",
        "e42_conv.md",
        "e42_conv.hints.md",
        "solutions/e42_conv.py",
        "check_e42_conv.py",
    }
    unsolved, solved = checked(tmp_path), checked(tmp_path, "solutions/e42_conv.py")
    assert (unsolved.returncode, solved.returncode) == (1, 0), solved.stdout + solved.stderr
    assert "not written yet" in unsolved.stdout
    wrong = (tmp_path / "solutions" / "e42_conv.py").read_text(encoding="utf-8").replace("2 * x * weight", "x * weight")
    (tmp_path / "e42_conv.py").write_text(wrong, encoding="utf-8")
    found = checked(tmp_path)
    assert found.returncode == 1 and "dx" in found.stdout
    assert len((tmp_path / "e42_conv.hints.md").read_text(encoding="utf-8").split("\n## ")) == 4  # three hints
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "exists" in again.stderr


def test_the_check_of_a_new_exercise_judges_what_is_written_and_says_in_a_line_what_is_not(tmp_path: Path) -> None:
    write_template("conv", tmp_path, 42)
    right = (tmp_path / "solutions" / "e42_conv.py").read_text(encoding="utf-8")
    dweight = "np.sum(x * x * dy, axis=0)"

    def said_of(*changes: tuple[str, str]) -> str:
        text = right
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "e42_conv.py").write_text(text, encoding="utf-8")
        done = checked(tmp_path)
        assert done.returncode == 1 and done.stderr.count("\n") <= 1, done.stderr
        return done.stdout + done.stderr

    half = said_of((dweight, "None"))
    assert "dx (5, 3)" in half and "✓ passes" in half and half.endswith("conv_backward returns None for dweight\n")
    assert "✗ wrong: dx" in said_of((dweight, "None"), ("2 * x * weight", "3 * x * weight"))
    assert said_of(("    return dx, dweight", "")) == (
        "conv_backward returns nothing: end it with return dx, dweight\n"
    )
    assert said_of(("return dx, dweight", "return dx")) == "conv_backward must return dx, dweight, got one ndarray\n"
    assert "e42_conv.py cannot be imported: SyntaxError" in said_of(("import numpy as np", "import numpy as"))
    assert "e42_conv.py has no function conv_backward" in said_of(("def conv_backward", "def backward"))
    lost = checked(tmp_path, "nowhere.py")
    assert lost.returncode == 1 and lost.stderr.startswith("nowhere.py: no such file; give the file of the exercise")


def test_the_check_of_a_new_exercise_takes_a_single_gradient_itself(tmp_path: Path) -> None:
    write_template("conv", tmp_path, 42)
    check = tmp_path / "check_e42_conv.py"
    edit(check, 'NAMES = ["dx", "dweight"]', 'NAMES = ["dx"]')
    edit(check, "[rng.standard_normal((5, 3)), rng.standard_normal(3)]", "[rng.standard_normal((5, 3))]")
    forward = "def conv_forward(x):\n    return x * x, x\n\n\ndef conv_backward(dy, x):\n    return "
    for backward, code, says in (
        ("2 * x * dy", 0, "✓ passes"),
        ("(2 * x * dy,)", 0, "✓ passes"),
        ("x * dy", 1, "✗ wrong: dx"),
        ("None", 1, "conv_backward returns nothing: end it with return dx"),
    ):
        (tmp_path / "e42_conv.py").write_text(f"{forward}{backward}\n", encoding="utf-8")
        done = checked(tmp_path)
        assert done.returncode == code and says in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["class", "Two Words", "2d", "a/b", "../x"])
def test_a_name_that_cannot_be_imported_is_refused(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["learn", "new", "--folder", str(tmp_path), "--", name])
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
