"""The command line itself: help, version, errors, and output to a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app

BAD_INPUT = {
    "table --preset gpt3": "unknown preset 'gpt3'; choose from gpt2,",
    "table --n-embd 10 --n-head 3": "n_embd=10 is not divisible by n_head=3",
    "table --lora-r 0": "r must be >= 1, got 0",
    "table --preset gpt2 --lm-head-bias": "tied logits have no bias",
    "walk --n-embd 9": "n_embd=9 is not divisible by n_head=2",
    "walk --n-head 0": "n_head must be an integer >= 1, got 0",
    "walk --activation tanh": "unknown activation_function 'tanh'",
    "walk --tokens 3,99": "token id 99 is outside 0 ... 9",
    "walk --tokens=-1,3": "token id -1 is outside 0 ... 9",
    "walk --tokens 3,x": "token 'x' is not an integer",
    "walk --tokens ,": "no tokens",
    "walk --tokens 3": "1 token has no target",
    "walk --tokens 1,2,3,4,5,6,7,8,9": "a sequence of 9 tokens exceeds n_positions=8",
    "attribute": "give either --tokens",
    "attribute --tokens 1,2 --text ab": "give either --tokens",
    "attribute --tokens 1,300": "token id 300 is outside 0 ... 255",
    "attribute --text a": "at least 2 tokens are needed to have a target, got 1",
    "attribute --text ab --vocab-size 300": "needs vocab_size=256, got 300",
    "attribute --text ab --top -1": "n_swaps must be >= 0, got -1",
    "attribute --tokens 1,2 --preset nothing": "unknown preset 'nothing'",
}


def as_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The result of `python -m onfoot` with its output in a pipe."""
    env = {**os.environ, "PYTHONUTF8": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "onfoot", *arguments], capture_output=True, env=env, encoding="utf-8", timeout=60
    )


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_ends_with_status_2_and_one_line_that_names_it(command: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert BAD_INPUT[command] in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_has_no_traceback_unless_debugging_is_on() -> None:
    plain = as_module("table", "--preset", "gpt3", ONFOOT_DEBUG="")
    assert plain.returncode == 2
    assert "Traceback" not in plain.stderr
    debug = as_module("table", "--preset", "gpt3", ONFOOT_DEBUG="1")
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    assert "ValueError: unknown preset" in debug.stderr


def test_a_missing_file_is_named_without_an_errno(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        open("no/such/file")  # noqa: SIM115

    monkeypatch.setattr("onfoot.cli.table.preset", absent)
    result = CliRunner().invoke(app, ["table"])
    assert result.exit_code == 2
    assert result.stderr == "error: no/such/file: No such file or directory\n"


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"onfoot {onfoot.__version__}\n"
    no_arguments = CliRunner().invoke(app, [])
    for command in ("table", "walk", "attribute"):
        assert command in no_arguments.output
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    assert "Δ_0[t, new] − Δ_0[t, old]" in " ".join(CliRunner().invoke(app, ["attribute", "--help"]).output.split())


def test_python_m_onfoot_is_the_same_program() -> None:
    assert as_module("--version").stdout == f"onfoot {onfoot.__version__}\n"
    piped = as_module("table", "--preset", "paper")
    assert piped.returncode == 0
    assert piped.stdout == CliRunner().invoke(app, ["table", "--preset", "paper"]).stdout


def test_a_pipe_gets_unwrapped_lines_without_colours_however_narrow_the_terminal() -> None:
    for arguments in (["table"], ["walk"], ["attribute", "--text", "on foot"]):
        out = as_module(*arguments, COLUMNS="40", TERM="xterm-256color").stdout
        assert "\x1b" not in out
        assert out == as_module(*arguments, COLUMNS="300", TERM="dumb").stdout
    table = as_module("table", COLUMNS="40").stdout
    assert "Δ_causal = [Δ_3^h vᵗ − ~((Δ_3^h vᵗ) ⊖ ρ)] ∘ ρ  25, 26" in table
    assert not [line for line in table.splitlines() if line != line.rstrip()]


def test_a_narrow_terminal_shows_complete_numbers_and_both_passes() -> None:
    out = CliRunner().invoke(app, ["table", "--table", "2"], env={"FORCE_COLOR": "1", "COLUMNS": "80"}).stdout
    assert "\x1b" in out
    assert "38,597,376" in out
    assert "↓ a_5 = a_1 + a_4" in out
    assert "↑ Δ_4 = Δ_5" in out


def test_a_reader_that_stops_early_is_not_an_error() -> None:
    command = f"{sys.executable} -m onfoot walk | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, encoding="utf-8", timeout=60)
    assert result.stdout.startswith("1 block")
    assert result.stderr == ""


def test_formulas_reach_a_pipe_with_an_ascii_encoding() -> None:
    out = as_module("table", "--table", "1", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert out.returncode == 0
    assert "Δ_raw = Δ_scaled / √d_ρ" in out.stdout
