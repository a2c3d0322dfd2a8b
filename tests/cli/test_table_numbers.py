"""The sums and shares of `onfoot table`, counted here by hand from the sizes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from typer.testing import CliRunner

from onfoot.cli import app

# d = 12, 3 heads with d_h = 5 and d_ρ = 2, 20 tokens, 7 positions, 11 inside the MLP, 2 blocks, r = 4
SIZES = {
    "n-layer": 2, "n-embd": 12, "n-head": 3, "head-dim": 5, "qk-head-dim": 2, "vocab-size": 20, "n-positions": 7,
    "n-inner": 11,
}  # fmt: skip
D, H, DH, DR, V, T, INNER, N, R = 12, 3, 5, 2, 20, 7, 11, 2, 4
HEAD = 2 * (D * DR + DR) + D * DH + DH
BLOCK = 2 * D + H * HEAD + (H * DH * D + D) + 2 * D + (D * INNER + INNER) + (INNER * D + D)
TIED = V * D + T * D + N * BLOCK + 2 * D
UNTIED, BIASED = TIED + V * D, TIED + V * D + V
LAYERS = {  # in → out
    "queries": (D, H * DR), "keys": (D, H * DR), "values": (D, H * DH), "FC attProj": (H * DH, D),
    "FC expand": (D, INNER), "FC contract": (INNER, D), "FC logits": (D, V),
}  # fmt: skip
LORA = {name: R * (n_in + n_out) for name, (n_in, n_out) in LAYERS.items()}
LORA_BLOCK = sum(n for name, n in LORA.items() if name != "FC logits")
LORA_TOTAL = N * LORA_BLOCK + LORA["FC logits"]


def run(*arguments: str) -> str:
    typed = [f"--{name}={value}" for name, value in SIZES.items()]
    result = CliRunner().invoke(app, ["table", *typed, "--lora-r", str(R), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def cells(output: str, name: str) -> list[str]:
    """The cells of the one row that begins so."""
    lines = [line for line in output.splitlines() if re.match(rf"(▌ )?{re.escape(name)}( {{2,}}|$)", line)]
    assert len(lines) == 1, (name, lines)
    return re.split(r" {2,}", lines[0].strip())


def percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def test_one_head_and_all_heads() -> None:
    output = run("--table", "1")
    assert cells(output, "one head")[-1] == f"{HEAD:,}"
    assert cells(output, "3 heads")[-1] == f"{H * HEAD:,}"
    assert cells(output, "Queries")[-1] == f"{D * DR + DR:,}" and cells(output, "Values")[-1] == f"{D * DH + DH:,}"
    assert "d = 12, d_ρ = 2, d_h = 5" in output


@pytest.mark.parametrize(
    ("options", "total", "this"),
    [
        (["--tied"], TIED, "tied"),
        (["--untied"], UNTIED, "untied"),
        (["--untied", "--lm-head-bias"], BIASED, "untied, with a logits bias"),
    ],
)
def test_one_block_all_blocks_and_the_network(options: list[str], total: int, this: str) -> None:
    output = run("--table", "2", *options)
    assert cells(output, "one block")[-1] == f"{BLOCK:,}"
    assert cells(output, "2 blocks")[-1] == f"{N * BLOCK:,}"
    assert cells(output, "the network")[-1] == f"{total:,}"
    (marked,) = [line for line in output.splitlines() if "← this one" in line]
    assert re.split(r" {2,}", marked)[0] == this and f"{total:,}" in marked
    for name, n in (("untied, with a logits bias", BIASED), ("untied", UNTIED), ("tied", TIED)):
        assert f"{n:,}" in cells(output.replace("  ← this one", ""), name)
    assert f"{percent(1 - TIED / BIASED)} fewer" in output
    assert cells(output, "b_k (no effect on the loss)")[1:] == [f"{N * H * DR}", f"{N} × {H * DR}"]


def test_every_parameter_has_its_shape_and_count() -> None:
    output = run("--table", "3", "--untied", "--lm-head-bias")
    rows = [re.split(r" {2,}", line.strip("▌ ")) for line in output.splitlines()]
    shapes = {row[-5]: row[-4:-2] for row in rows if len(row) >= 5 and re.fullmatch(r"[wb]_\w+", row[-5])} | {
        cell: row[i + 1 : i + 3] for row in rows for i, cell in enumerate(row[:2]) if re.fullmatch(r"[wb]_\w+", cell)
    }
    assert shapes["w_q"] == ["3 × (12 × 2)", f"{H * D * DR:,}"] and shapes["b_q"] == ["3 × (2)", f"{H * DR}"]
    assert shapes["w_v"] == ["3 × (12 × 5)", f"{H * D * DH:,}"]
    assert shapes["w_6"] == ["12 × 11", f"{D * INNER}"] and shapes["w_11"] == ["12 × 20", f"{D * V}"]
    assert cells(output, "all")[1] == f"{BIASED:,}"


def test_both_passes_of_a_block_are_written_out() -> None:
    output = run("--table", "2")
    for formula in ("a_5 = a_1 + a_4", "Δ_5 = Δ_10 + LNᵇ_5(Δ_6)", "Δ_1 = Δ_5 + LNᵇ_1(Δ_2)", "Δ_8 = Δ_10 w_8ᵗ"):
        assert formula in output


def test_lora_is_counted_layer_by_layer() -> None:
    output = run("--table", "3", "--untied", "--lm-head-bias")
    sheet = output[output.index("LoRA ·") :]
    assert "rank r = 4" in sheet
    for name, (n_in, n_out) in LAYERS.items():
        frozen = n_in * n_out + n_out
        sizes = [f"{n_in} → {n_out}", f"{n_in * R}", f"{R * n_out}", f"{LORA[name]}", percent(LORA[name] / frozen)]
        assert cells(sheet, name)[1:] == sizes, name
    assert cells(sheet, "one block")[1:] == [f"{LORA_BLOCK:,}", percent(LORA_BLOCK / BLOCK)]
    assert cells(sheet, "on every layer")[1:] == [f"{LORA_TOTAL:,}", percent(LORA_TOTAL / BIASED)]
    assert f"{N} × {LORA_BLOCK:,} + {LORA['FC logits']} = {LORA_TOTAL:,}: {percent(1 - LORA_TOTAL / BIASED)}" in sheet


def test_the_json_has_the_same_numbers() -> None:
    data: dict[str, Any] = json.loads(run("--untied", "--lm-head-bias", "--format", "json"))
    assert data["counts"]["total"] == BIASED and data["counts"]["block"] == BLOCK
    assert {row["layer"]: row["count"] for row in data["lora"]["rows"]} == LORA
    assert {row["layer"]: (row["down"], row["up"]) for row in data["lora"]["rows"]} == {
        name: (n_in * R, R * n_out) for name, (n_in, n_out) in LAYERS.items()
    }
    assert (data["lora"]["block"], data["lora"]["total"]) == (LORA_BLOCK, LORA_TOTAL)
    assert data["lora"]["fewer"] == pytest.approx(1 - LORA_TOTAL / BIASED)
    by_symbol = {row["symbol"]: row for row in data["table_3"]}
    assert (by_symbol["w_q"]["each"], by_symbol["w_q"]["count"]) == (D * DR, H * D * DR)
    assert (by_symbol["w_8"]["each"], by_symbol["w_8"]["count"]) == (INNER * D, INNER * D)


def test_a_cell_with_a_bar_is_one_cell() -> None:
    from onfoot.cli.console import Sheet, markdown

    text = markdown(Sheet("title", ["left", ">right"], [("a|b", "1")], ["a note"]))
    assert text.splitlines()[2:5] == ["| left | right |", "| --- | ---: |", "| a\\|b | 1 |"]
