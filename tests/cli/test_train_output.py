"""The report at the end of `onfoot train`: loss, perplexity, bigram model and output files."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.cli.train import first_word, next_run_folder, resume_run, train_and_report
from onfoot.train.options import TrainOptions

SMALL = [
    "--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--context", "24", "--batch-size", "2", "--steps", "4",
    "--eval-every", "4", "--save-every", "4", "--eval-windows", "1000", "--sample-tokens", "4", "--warmup", "1",
]  # fmt: skip


def test_the_numbers_at_the_end_are_those_of_the_saved_model(tmp_path: Path) -> None:
    text = "".join(chr(97 + (i * i) % 7) + " " * (i % 3 == 0) for i in range(4000))
    (tmp_path / "text.txt").write_text(text)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), *SMALL])
    assert result.exit_code == 0, result.output
    loss, perplexity = map(float, re.findall(r"validation loss ([\d.]+) .*\(perplexity ([\d.]+)\)", result.output)[0])
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    n = sum(t.size for t in load_file(tmp_path / "run" / "best" / "model.safetensors").values())
    assert f"{n:,} of {n:,} parameters" in result.output
    found = r"has ([\d.]+) nats per token on the held-out text: the model is ([\d.]+) (above|below) it"
    bigram, gap, word = re.findall(found, result.output)[0]
    ids = list(text.encode())
    n_train = len(ids) - len(ids) // 10
    pairs, firsts = Counter(pairwise(ids[:n_train])), Counter(ids[: n_train - 1])
    held_out = list(pairwise(ids[n_train:]))
    unsmoothed = -sum(math.log(pairs[a, b] / firsts[a]) for a, b in held_out) / len(held_out)
    assert float(bigram) == pytest.approx(unsmoothed, abs=0.01)  # so many pairs of 8 letters need no smoothing
    assert float(gap) == pytest.approx(abs(float(bigram) - loss), abs=0.006)
    assert word == ("below" if loss < float(bigram) else "above")


def test_the_first_line_comes_before_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onfoot.train.pretrain", None)  # it cannot be imported
    monkeypatch.delattr(onfoot.train, "pretrain", raising=False)

    def said(*words: str) -> str:
        result = CliRunner().invoke(app, ["train", *words])
        assert isinstance(result.exception, ImportError)
        return result.stdout

    assert said() == "reading the language reference included with Python\n"
    assert said("a.txt", "notes") == "reading a.txt, notes\n"
    assert said("a.txt", "--quiet") == ""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert said("a.txt") == ""  # only the first rank


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1 2.3 of it: The cat", "The"),
        ("tion of an éclair", "éclair"),  # the held-out text begins within a word
        ("\n\n4.1. x_max, abc1 abcd.", "abcd"),
        ("whole", "whole"),
        ("1 2 3", "1"),
        ("\x00 \x01", ""),
        ("", ""),
    ],
)
def test_the_printed_prompt_is_a_word(text: str, word: str) -> None:
    assert first_word(text) == word


def test_the_printed_prompt_is_of_the_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one day " * 450 + " 1 2 3. " * 20 + "later " * 40)
    result = CliRunner().invoke(app, ["train", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), *SMALL])
    assert result.exit_code == 0, result.output
    assert "--prompt later --max-new-tokens 200 --slide" in result.output


class Ended:
    """A trainer that has nothing left to do."""

    def __init__(self, loss: float, bigram: float | None, interrupted: bool = False) -> None:
        self.model = onfoot.create(onfoot.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=1, n_head=1))
        self.options, self.folder = TrainOptions(steps=7), Path("runs/x")
        self.source = SimpleNamespace(report=lambda: "the data", prompt=lambda: None, rows=84)
        self.state, self.bigram, self.privacy = SimpleNamespace(step=7), bigram, None
        self.outcome = SimpleNamespace(interrupted=interrupted, validation_loss=loss, state=self.state, stopped="")

    def run(self) -> Any:
        return self.outcome

    def sample(self) -> None:
        return None


@pytest.mark.parametrize(
    ("loss", "bigram", "words"),
    [
        (1.5, 2.25, ["1.5000", "perplexity 4.48", "2.2500", "0.75 below"]),
        (2.0, 1.75, ["2.0000", "perplexity 7.39", "1.7500", "0.25 above"]),
        (800.0, None, ["800.0000", "perplexity 1014232054735004"]),
    ],
)
def test_better_is_below_the_bigram_model(
    loss: float, bigram: float | None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train_and_report(Ended(loss, bigram))  # type: ignore[arg-type]
    output = capsys.readouterr().out
    assert [word for word in words if word not in output] == []
    assert ("bigram" in output) == (bigram is not None)


def test_trainable_parameters_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    ended: Any = Ended(1.0, None)
    n = ended.model.n_params
    ended.model.add_lora(r=1)
    train_and_report(ended)
    assert f"{ended.model.n_trainable:,} of {n + ended.model.n_trainable:,} parameters" in capsys.readouterr().out


def test_the_end_of_a_run_is_reported_also_if_its_sample_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    ended: Any = Ended(1.0, None)

    def sample() -> None:
        raise KeyboardInterrupt

    ended.sample = sample
    train_and_report(ended)
    output = capsys.readouterr().out
    assert "(interrupted)" in output
    assert f"{Path('runs/x') / 'best'}" in output and "loss.png" in output and "onfoot generate runs/x" in output


def test_the_end_of_a_run_is_reported_also_if_it_is_interrupted_before_its_sample(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onfoot.train.pretrain.bits_per_byte", interrupted)
    train_and_report(Ended(1.0, None))  # type: ignore[arg-type]
    output = capsys.readouterr().out
    assert "(interrupted)" in output and "loss.png" in output and "onfoot generate runs/x" in output


def test_the_length_of_the_run_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    train_and_report(Ended(1.0, None))  # type: ignore[arg-type]
    said = "7 steps of 12 rows, 1 pass over the data; learning rate 0.003 after 1 warmup step\n"
    assert said in capsys.readouterr().out


def test_an_interrupted_run_ends_with_the_shells_status() -> None:
    with pytest.raises(typer.Exit) as ended:
        train_and_report(Ended(1.0, None, interrupted=True))  # type: ignore[arg-type]
    assert ended.value.exit_code == 130


def test_a_complete_run_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    def resume(run: Path) -> tuple[Any, list[str]]:
        return Ended(1.0, None), ["a warning"]

    context: Any = SimpleNamespace(params={})
    resume_run(context, Path("runs/x"), resume)
    output = capsys.readouterr().out
    assert "a warning" in output and "all 7 steps are done" in output and "resuming" not in output


def test_new_runs_are_numbered_from_one(tmp_path: Path) -> None:
    assert next_run_folder(tmp_path, "train") == tmp_path / "train-001"
    (tmp_path / "train-001").mkdir()
    (tmp_path / "train-003").mkdir()
    assert next_run_folder(tmp_path, "train") == tmp_path / "train-002"
