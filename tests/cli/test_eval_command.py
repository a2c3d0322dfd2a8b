"""`onfoot eval`: the figures of `onfoot.evaluate`, models side by side, JSON, and options that do not go together."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.cli.evaluate import as_json, sheet
from onfoot.evaluation import Evaluation
from onfoot.formats.tokenizer import byte_tokenizer, char_tokenizer

TEXT = "a rose is a rose is a rose\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with one tokenizer, one with another, an adapter, and a text."""
    folder = tmp_path_factory.mktemp("eval")
    for name, seed, n_positions in (("one", 0, 32), ("two", 1, 24)):
        model = onfoot.create(onfoot.GPT2Config(257, n_positions, 16, 1, 2, n_inner=16), seed)
        model.tokenizer = byte_tokenizer()
        model.save(folder / name)
    model.add_lora(r=2)
    for name in model.trainable:
        model.params[name] = np.random.default_rng(0).normal(0, 1, model.params[name].shape).astype(np.float32)
    model.save_adapter(folder / "adapter")
    characters = char_tokenizer([TEXT])
    model = onfoot.create(onfoot.GPT2Config(characters.size, 32, 16, 1, 2, n_inner=16))
    model.tokenizer = characters
    model.save(folder / "characters")
    (folder / "text.txt").write_text(TEXT)
    return folder


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_the_table_and_the_json_have_the_figures_of_evaluate(folder: Path, tmp_path: Path) -> None:
    data, path = folder / "text.txt", tmp_path / "out.json"
    options = ("--data", data, "--context", 20, "--stride", 7, "--batch-size", 2, "--limit", 60)
    said = run(folder / "one", folder / "two", *options, "--json", path)
    values = json.loads(path.read_text())
    assert list(values["models"]) == [str(folder / "one"), str(folder / "two")] and values["data"] == str(data)
    for name, figures in values["models"].items():
        expected = onfoot.evaluate(onfoot.load(name), data, context=20, stride=7, limit=60)
        assert figures["loss"] == pytest.approx(expected.loss, abs=1e-6)
        assert figures["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
        assert figures["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)
        assert (figures["n_tokens"], figures["n_bytes"]) == (60, 60)
        assert (figures["context"], figures["stride"]) == (20, 7)
        row = next(line for line in said.splitlines() if line.startswith(name))
        bits = f"{figures['bits_per_byte']:.4f}"
        assert row.split()[1:] == [f"{figures['loss']:.4f}", f"{figures['perplexity']:,.3f}", bits, "60", "60"]
    assert "windows of 20 tokens, stride 7" in said and "tokenizers" not in said and f"JSON {path}" in said
    assert json.loads(run(folder / "one", folder / "two", *options, "--json", "-")) == values


def test_contexts_and_tokenizers_that_differ_are_named(folder: Path) -> None:
    said = run(folder / "one", folder / "two", "--data", folder / "text.txt")
    assert "windows of 24 and 32 tokens; to compare the models, give --context 24" in said
    said = run(folder / "one", folder / "characters", "--data", folder / "text.txt", "--context", 16)
    assert "different tokenizers: compare bits per byte; nats per token are not comparable" in said


def test_an_adapter_is_loaded(folder: Path) -> None:
    data = folder / "text.txt"
    plain, tuned = (
        json.loads(run(folder / "two", "--data", data, "--json", "-", *more))["models"][str(folder / "two")]["loss"]
        for more in ((), ("--adapter", folder / "adapter"))
    )
    model = onfoot.load(folder / "two")
    model.load_adapter(folder / "adapter")
    assert tuned == pytest.approx(onfoot.evaluate(model, data).loss, abs=1e-6) != pytest.approx(plain, abs=1e-2)


def test_options_that_do_not_go_together_are_refused(folder: Path, tmp_path: Path) -> None:
    one, two, data = folder / "one", folder / "two", ("--data", folder / "text.txt")
    for options, message in (
        ((one,), "give either --data FILE or --tasks NAME"),
        ((one, *data, "--tasks", "x"), "give either --data FILE or --tasks NAME"),
        ((one, "--tasks", "x", "--stride", 3), "--stride cannot be used with --tasks"),
        ((one, two, *data, "--adapter", folder / "adapter"), "--adapter needs exactly one MODEL"),
        ((one, one, *data), "one is given twice"),
        ((one, *data, "--json", tmp_path / "no" / "x.json"), "no does not exist; create it first"),
        ((one, *data, "--stride", 33), "stride must be in 1 ... 32, the context, got 33"),
        ((one, *data, "--context", 33), "context=33 exceeds n_positions=32"),
    ):
        assert re.sub(r"\s+", " ", run(*options, status=2)).count(message) == 1


def test_without_lm_eval_the_install_command_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.split(".")[0] == "lm_eval" or name == "onfoot.lm_eval":
            raise ImportError("no lm_eval")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert 'pip install "onfoot[lm-eval]"' in run(folder / "one", "--tasks", "x", status=2)


def test_what_cannot_be_written_is_a_dash_or_null() -> None:
    huge = Evaluation(800.0, 4, 0, 8, 4, "")
    assert as_json(huge)["perplexity"] is None and as_json(huge)["bits_per_byte"] is None
    ((name, loss, perplexity, bits, *_),) = sheet({"m": huge}, "x.txt").rows
    assert (name, loss, perplexity, bits) == ("m", "800.0000", "inf", "–")
    ((_, _, perplexity, *_),) = sheet({"m": Evaluation(20.0, 4, 4, 8, 4, "")}, "x.txt").rows
    assert perplexity == "4.852e+08"
