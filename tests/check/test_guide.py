"""The guide shows the real output: its versions of a file and its examples are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onfoot.check import CATALOGUE, LAYERS
from onfoot.cli import app

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
STEPS = re.findall(r"```python\n(.*?)```\n\n```console\n(.*?)```", GUIDE, re.DOTALL)
EXAMPLES = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "onfoot" in code]


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_step_of_the_guide_has_the_output_shown(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, console = STEPS[step]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_attention.py").write_text(code, encoding="utf-8")
    command, *shown = console.splitlines()
    result = CliRunner().invoke(app, command.removeprefix("$ onfoot ").split())
    assert result.exit_code == (0 if step >= 2 else 1)
    for part in re.split(r"^\.\.\.$", "\n".join(shown), flags=re.MULTILINE):
        assert part.strip("\n") in result.stdout


def test_the_guide_ends_in_a_passing_check() -> None:
    assert len(STEPS) == 4
    assert "--strict" in STEPS[-1][1] and "✓ passes" in STEPS[-1][1]


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_of_the_guide_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "guide"}
    exec(compile(code, "check.md", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert ("def test_" in code) == bool(tests)
    for test in tests:
        test()


def test_the_guide_has_every_layer_with_its_signature() -> None:
    for layer in LAYERS.values():
        assert f"| `{layer.name}` |" in GUIDE
    without = [x for x in LAYERS.values() if f"`({', '.join(x.arguments)})` → {', '.join(x.gradients)}" not in GUIDE]
    too_long = ["cross_attention", "block", "relu_block", "post_norm_block"]  # for a row of the table
    assert [layer.name for layer in without] == too_long
    assert f"[{len(LAYERS)} layers]" in GUIDE
    assert abs(len(CATALOGUE) - 240) < 10
