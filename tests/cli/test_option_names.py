"""Options generated from a dataclass: their names, and the PEFT-style names of the LoRA options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.cli.fields import options_from, reject_with
from onfoot.train import finetune as runs


@dataclass(frozen=True)
class Options:
    """Two options and one that the command defines itself."""

    rank: int = field(default=3, metadata={"help": "The rank."})
    batch_size: int = field(default=4, metadata={"help": "The batch size."})
    data: str = field(default="", metadata={"help": "Left out."})


def command(**names: tuple[str, ...]) -> tuple[typer.Typer, list[dict[str, Any]]]:
    """A command with these options, and the list of the values that it was called with."""
    calls: list[dict[str, Any]] = []
    one = typer.Typer()

    @one.command()
    @options_from(Options, exclude={"data"}, names=names)
    def run(context_: typer.Context, full: bool = False, **values: Any) -> None:
        """Runs."""
        if full:
            reject_with(context_, "--full", ("rank",), "it has no rank")
        calls.append(values)

    return one, calls


@pytest.mark.parametrize("spelling", ["--rank", "--lora-rank", "-r"])
def test_every_name_of_an_option_sets_the_same_field(spelling: str) -> None:
    one, calls = command(rank=("--rank", "--lora-rank", "-r"))
    assert CliRunner().invoke(one, [spelling, "8"]).exit_code == 0
    assert CliRunner().invoke(one, []).exit_code == 0
    assert calls == [{"rank": 8, "batch_size": 4}, {"rank": 3, "batch_size": 4}]


def test_without_names_an_option_is_called_like_its_field() -> None:
    one, calls = command()
    assert CliRunner().invoke(one, ["--batch-size", "9", "--rank", "2"]).exit_code == 0
    assert calls == [{"rank": 2, "batch_size": 9}]
    assert CliRunner().invoke(one, ["--lora-rank", "2"]).exit_code == 2


def test_a_conflict_is_reported_with_the_first_name() -> None:
    one, _ = command(rank=("--rank", "--lora-rank", "-r"))
    result = CliRunner().invoke(one, ["--full", "-r", "2"])
    assert str(result.exception) == "--full cannot be used with --rank: it has no rank"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], (16, 16.0, "")),
        (["--r", "4", "--alpha", "8", "--targets", "c_attn"], (4, 8.0, "c_attn")),
        (["--lora-rank", "4", "--lora-alpha", "8", "--target-modules", "c_attn"], (4, 8.0, "c_attn")),
        (["-r", "4", "--lora-alpha=8"], (4, 8.0, "")),
    ],
    ids=lambda x: " ".join(map(str, x)) or "defaults",
)
def test_finetune_accepts_the_names_of_peft(
    typed: list[str], expected: tuple[int, float, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(run: Path, options: Any) -> None:
        started.append(options)
        raise ValueError("started")

    monkeypatch.setattr(runs, "start", start)
    result = CliRunner().invoke(app, ["finetune", "model", "--data", "x.jsonl", "--out", str(tmp_path / "run"), *typed])
    assert "started" in result.output, result.output
    assert [(o.r, o.alpha, o.targets) for o in started] == [expected]


@pytest.mark.parametrize(
    "typed",
    [
        ["--betas", "0.8", "0.95"],
        ["--betas", "0.8,0.95"],
        ["--betas=0.8,0.95"],
        ["--betas", "0.8,", "0.95"],
        ["--betas", "0.8, 0.95"],
        ["--betas=0.8", "0.95"],
    ],
    ids=" ".join,
)
def test_two_values_may_have_the_comma_that_help_shows(typed: list[str]) -> None:
    result = CliRunner().invoke(app, ["train", *typed, "a,b.txt", "--print-config"])
    assert "betas = [0.8, 0.95]\n" in result.output and 'texts = ["a,b.txt"]\n' in result.output, result.output


@pytest.mark.parametrize("typed", [["--betas", "0.8"], ["--betas", "0.8,x"], ["--betas", "0.8,0.9,0.95"], ["--betas="]])
def test_anything_but_two_values_is_still_refused(typed: list[str]) -> None:
    assert CliRunner().invoke(app, ["train", "--print-config", *typed]).exit_code == 2


def test_peft_names_conflict_with_full_fine_tuning_too() -> None:
    result = CliRunner().invoke(
        app, ["finetune", "model", "--data", "x.jsonl", "--full", "-r", "4", "--lora-alpha", "8"]
    )
    assert result.exit_code == 2 and "--full cannot be used with --r, --alpha: " in result.output
