"""Every number that `onfoot attribute` prints, against the library's own and against the loss itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.cli.attribute import SMALL
from onfoot.formats.tokenizer import byte_tokenizer


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["attribute", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(output: str, title: str) -> list[list[str]]:
    """The cells of the sheet below a title."""
    lines = output[output.index(title) :].splitlines()
    begin = next(i for i, line in enumerate(lines) if set(line.strip()) <= {"─", "━"} and line.strip()) + 1
    out = []
    for line in lines[begin:]:
        if not re.match(r" *\d", line):
            break
        out.append(re.split(r" {2,}", line.strip()))
    return out


def test_the_sheet_holds_the_numbers_of_the_loss_and_of_every_token() -> None:
    text = "on foot, on foot!"
    ids = np.array([list(text.encode())])
    model = onfoot.create(SMALL, 5, "float64")
    output = run("--text", text, "--seed", 5, "--top", 3)
    assert f"loss {model.loss(ids):.6f}" in output.splitlines()
    trace = model.trace(ids, input_gradient=True)
    right = trace.delta[0][0][np.arange(ids.size), ids[0]]  # Δ_0[t, id]
    found = rows(output, "Gradient × input")
    assert [cells[0] for cells in found] == [str(t) for t in range(ids.size)]
    assert [int(cells[1]) for cells in found] == ids[0].tolist()
    assert [cells[2] for cells in found] == [repr(c) for c in text]
    assert [cells[3] for cells in found] == [f"{value:+.6f}" for value in right]
    bars = [cells[4] if len(cells) > 4 else "" for cells in found]
    expected = [("+" if value > 0 else "−") * round(24 * abs(value) / abs(right).max()) for value in right]
    assert bars == expected and max(map(len, bars)) == 24 and "+" in "".join(bars) and "−" in "".join(bars)


def test_swaps_are_shown_with_their_predicted_and_actual_change() -> None:
    ids = np.array([[3, 1, 4, 1, 5]])
    typed = ["--tokens", "3 1 4 1 5", "--vocab-size", 10, "--n-layer", 1, "--top", 4]
    found = rows(run(*typed), "Best swaps")
    assert len(found) == 4
    data = json.loads(run(*typed, "--format", "json"))
    model = onfoot.create(
        onfoot.GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=10, n_positions=256), 0, "float64"
    )
    targets = np.array([[1, 4, 1, 5, -100]])
    assert data["loss"] == model.loss(ids)
    delta = model.trace(ids, input_gradient=True).delta[0][0]
    for cells, swap in zip(found, data["swaps"], strict=True):
        t, old, new = int(cells[0]), int(cells[1]), int(cells[2])
        assert (t, old, new) == (swap["position"], swap["old"], swap["new"]) and old == ids[0, t]
        swapped = ids.copy()
        swapped[0, t] = new
        assert cells[3] == f"{delta[t, new] - delta[t, old]:+.6f}"
        assert cells[4] == f"{model.loss(swapped, targets) - model.loss(ids, targets):+.6f}"


def test_a_loaded_models_numbers_are_its_own(tmp_path: Path) -> None:
    model = onfoot.create(onfoot.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=257, n_positions=16), 3)
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path)
    output = run(tmp_path, "--text", "a b", "--top", 2)
    ids = model.tokenizer.encode("a b")
    result = onfoot.attribution.attribute(onfoot.load(tmp_path), ids, n_swaps=2)
    assert f"loss {result.loss:.6f}" in output
    found = rows(output, "Gradient × input")
    assert [cells[1:4] for cells in found] == [
        [str(i), repr(c), f"{x:+.6f}"] for i, c, x in zip(ids, "a b", result.contributions, strict=True)
    ]
    assert [cells[-2:] for cells in rows(output, "Best swaps")] == [
        [f"{swap.predicted:+.6f}", f"{swap.actual:+.6f}"] for swap in result.swaps
    ]
