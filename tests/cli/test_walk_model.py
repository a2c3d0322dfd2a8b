"""`onfoot walk MODEL`: every array of one's own model and text, checked, within 80 columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from llama_oracle import scrambled_llama
from onfoot.cli import app
from onfoot.explore.default_model import FOLDER

LLAMA = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=16, intermediate_size=11, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("walk") / "llama"
    scrambled_llama(LLAMA, 0).save(path)
    return path


def test_a_llama_is_walked_with_every_gradient_checked(folder: Path) -> None:
    result = CliRunner().invoke(app, ["walk", str(folder), "--tokens", "3 1 4 1", "--format", "json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    model = onfoot.load(folder, "float64", "numpy")
    trace = model.trace(np.array([[3, 1, 4, 1]]))
    assert data["loss"] == trace.loss and data["failed"] == []
    lines = [step for section in data["sections"] for step in section["steps"]]
    assert data["checks"] == sum("check" in line for line in lines) > 30
    found = {line["symbol"]: np.array(line["value"], dtype=float) for line in lines if line["symbol"] in ("a_g", "Δ_6")}
    np.testing.assert_array_equal(found["a_g"], trace["a_g", 0][0])
    np.testing.assert_array_equal(found["Δ_6"], trace["Δ_6", 0][0])
    keys = [line for line in lines if line["symbol"] == "∂k"]
    assert len(keys) == 2  # one per key head, not one per query head
    named = {line.get("parameter", "").split(",")[0] for line in lines} - {""}
    assert named == set(model.params)


def test_the_walk_is_in_the_order_of_both_passes(folder: Path) -> None:
    out = CliRunner().invoke(app, ["walk", str(folder), "--tokens", "3 1 4 1", "--format", "json"]).stdout
    symbols = [step["symbol"] for section in json.loads(out)["sections"] for step in section["steps"]]
    order = ["a_0", "a_tok", "a_2", "q_lin", "q", "ρ", "a_5", "a_g", "a_8", "a_12", "Δ_12", "Δ_8", "Δ_g", "Δ_5", "Δ_0"]
    places = [symbols.index(one) for one in order]
    assert places == sorted(places)


@pytest.mark.parametrize("arguments", [[], ["FOLDER", "--text", "the"], ["LLAMA", "--tokens", "3 1 4 1 5"]])
def test_every_printed_line_fits_in_80_columns(arguments: list[str], folder: Path) -> None:
    places = {"FOLDER": str(FOLDER), "LLAMA": str(folder)}
    result = CliRunner().invoke(app, ["walk", *(places.get(one, one) for one in arguments)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) > 300
    assert [line for line in lines if len(line) > 80] == []
    assert lines[-1].startswith("✓ all ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER"], "a model needs an input; give --text"),
        (["FOLDER", "--text", "a", "--tokens", "1 2"], "a model needs an input; give --text"),
        (["FOLDER", "--text", "the", "--n-layer", "2"], "a model has its own configuration"),
        (["--text", "the"], "--text needs a model with a tokenizer"),
        (["LLAMA", "--text", "the"], "has no tokenizer; give token ids"),
    ],
)
def test_what_cannot_be_walked_is_refused_in_one_line(arguments: list[str], message: str, folder: Path) -> None:
    places = {"FOLDER": str(FOLDER), "LLAMA": str(folder)}
    result = CliRunner().invoke(app, ["walk", *(places.get(one, one) for one in arguments)])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
