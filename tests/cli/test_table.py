"""Tables 1 to 3: the paper's numbers come out of the shapes of the parameters, and the formulas are the right ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import onfoot
from onfoot import tables
from onfoot.cli import app
from onfoot.config import PRESETS, GPT2Config, preset
from onfoot.models.params import block_shapes, count, shapes

ODD = GPT2Config(
    n_layer=3, n_embd=10, n_head=3, head_dim=3, qk_head_dim=5, vocab_size=17, n_positions=6, n_inner=7,
    tie_word_embeddings=False, lm_head_bias=True,
)  # fmt: skip


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["table", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    return json.loads(run("--format", "json", *arguments))


# What the paper states, or what follows from its formulas: preset -> texts that its tables must hold
STATED = {
    "paper": ["7,087,872", "85,120,849", "38,647,633", "38,597,376 + 50,257", "12,288", "804,112", "816,400", "2.11 %"],
    "paper-12": [
        "7,087,872", "163,087,441", "163,037,184", "124,439,808", "23.70 % fewer", "9,216", "12 × 768",
        "12 × 221,184 + 816,400 = 3,470,608", "97.87 % fewer than the 163,087,441",
        "38,597,376", "786,432", "589,824", "2,359,296", "3,072",
    ],
    "gpt2": ["124,439,808", "23.70 % fewer", "12 × 221,184 + 816,400 = 3,470,608"],
}  # fmt: skip


@pytest.mark.parametrize("output", ["rich", "markdown"])
@pytest.mark.parametrize("name", STATED)
def test_the_papers_numbers_come_out(name: str, output: str) -> None:
    text = run("--preset", name, "--format", output)
    for stated in STATED[name]:
        assert stated in text, stated


def test_the_papers_numbers_are_in_the_json() -> None:
    one, twelve, tied = (run_json("--preset", name) for name in ("paper", "paper-12", "gpt2"))
    assert one["counts"]["block"] == 7_087_872
    assert one["counts"]["total"] == 85_120_849
    assert twelve["counts"]["total"] == twelve["counts"]["untied_with_bias"] == 163_087_441
    assert twelve["counts"]["untied"] == 163_037_184
    assert tied["counts"]["total"] == twelve["counts"]["tied"] == 124_439_808
    assert round(100 * tied["counts"]["saved_by_tying"], 2) == 23.70
    assert twelve["counts"]["logits"] == 38_647_633
    assert (twelve["counts"]["dead_per_block"], twelve["counts"]["dead"]) == (768, 9_216)
    logits = twelve["lora"]["rows"][-1]
    assert (logits["down"], logits["up"], logits["count"]) == (12_288, 804_112, 816_400)
    assert round(100 * logits["count"] / logits["frozen"], 2) == 2.11
    assert (twelve["lora"]["block"], twelve["lora"]["total"]) == (221_184, 3_470_608)
    assert round(100 * twelve["lora"]["fewer"], 2) == 97.87
    by_symbol = {row["symbol"]: row["count"] for row in twelve["table_3"]}
    assert by_symbol == {
        "w_tok": 38_597_376, "w_pos": 786_432, "w_1": 768, "b_1": 768, "w_q": 589_824, "b_q": 768, "w_k": 589_824,
        "b_k": 768, "w_v": 589_824, "b_v": 768, "w_3": 589_824, "b_3": 768, "w_5": 768, "b_5": 768, "w_6": 2_359_296,
        "b_6": 3_072, "w_8": 2_359_296, "b_8": 768, "w_10": 768, "b_10": 768, "w_11": 38_597_376, "b_11": 50_257,
    }  # fmt: skip


@pytest.mark.parametrize("config", [*PRESETS.values(), ODD], ids=[*PRESETS, "odd"])
def test_rows_add_up_to_the_parameters_of_the_model(config: GPT2Config) -> None:
    total = count(shapes(config))
    n = config.n_layer
    assert sum(row.count * (n if row.in_block else 1) for row in tables.table_3(config)) == total
    assert sum(row.parameters * (n if row.in_block else 1) for row in tables.table_2(config)) == total
    assert sum(row.parameters for row in tables.table_2(config) if row.in_block) == count(block_shapes(config))
    heads = {name: shape for name, shape in block_shapes(config).items() if name.startswith("attn.c_attn")}
    assert config.n_head * sum(row.parameters for row in tables.table_1(config)) == count(heads)


def test_rows_add_up_to_a_model_that_was_really_made() -> None:
    assert tables.counts(ODD).total == onfoot.create(ODD).n_params


@pytest.mark.parametrize("config", [*PRESETS.values(), ODD], ids=[*PRESETS, "odd"])
def test_every_tensor_of_the_model_has_its_rows_in_table_3(config: GPT2Config) -> None:
    sizes: dict[str, int] = {}
    for row in tables.table_3(config):
        name = f"transformer.h.0.{row.name}" if row.in_block else row.name
        sizes[name] = sizes.get(name, 0) + row.count
    first_block = {name: shape for name, shape in shapes(config).items() if not re.search(r"\.h\.[1-9]", name)}
    assert sizes == {name: math.prod(shape) for name, shape in first_block.items()}


@pytest.mark.parametrize("r", [1, 2])
def test_lora_counts_are_those_of_an_adapter_with_queries_keys_and_values_apart(r: int) -> None:
    model = onfoot.create(ODD)
    model.add_lora(r=r, targets=["c_attn.q", "c_attn.k", "c_attn.v", "c_proj", "c_fc", "lm_head"])
    _, total = tables.lora_total(tables.lora_rows(ODD, r))
    assert total == sum(array.size for name, array in model.params.items() if ".lora_" in name)


def test_the_mask_is_minus_infinity_and_not_a_product() -> None:
    text = run("--table", "1")
    assert "ρ_causal = ρ_scaled, −∞ above the diagonal" in text
    assert "Causal mask" not in run("--table", "1", "--no-causal")
    assert "Δ_scaled = [Δ_3^h vᵗ − ~((Δ_3^h vᵗ) ⊖ ρ)] ∘ ρ" in run("--table", "1", "--no-causal")


def test_the_error_signal_passes_the_frozen_layer_below_lora_too() -> None:
    text = run("--preset", "paper", "--table", "3")
    assert "Δ_11 = Δ_12 w_11ᵗ + α Δ_12 (d_11 u_11)ᵗ   (eq LORA.2)" in text


def test_the_gradient_of_a_tied_table_is_the_sum_of_both_paths() -> None:
    tied, untied = run("--table", "3"), run("--table", "3", "--untied")
    assert "∂w_tok = ohe(a_0)ᵗ Δ_1 + (a_11ᵗ Δ_12)ᵗ  3, TIE.1" in tied
    assert "w_11 " not in tied
    assert re.search(r"∂w_tok = ohe\(a_0\)ᵗ Δ_1 +3 ", untied)
    assert "∂w_11 = a_11ᵗ Δ_12" in untied


def test_tying_a_preset_drops_its_logits_bias() -> None:
    assert run_json("--preset", "paper-12", "--tied")["counts"]["total"] == 124_439_808


def test_sizes_can_be_changed_and_shapes_follow() -> None:
    sizes = {
        "n_layer": 2,
        "n_embd": 12,
        "n_head": 3,
        "head_dim": 5,
        "qk_head_dim": 2,
        "vocab_size": 30,
        "n_positions": 7,
    }
    data = run_json(*(f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()))
    shape = {row["layer"]: row["shape"] for row in [*data["table_1"], *data["table_2"]]}
    assert shape["Queries"] == "n_T × 2"
    assert shape["Values"] == "n_T × 5"
    assert shape["Multi-head attention"] == "n_T × 15"
    assert shape["FC expand"] == "n_T × 48"
    assert shape["FC logits"] == "n_T × 30"
    assert data["counts"]["total"] == count(shapes(preset("gpt2", **sizes)))


@pytest.mark.parametrize("which", ["1", "2", "3"])
def test_one_table_can_be_asked_for(which: str) -> None:
    text = run("--table", which)
    assert re.findall(r"Table (\d) ·", text) == [which]
    assert [key for key in run_json("--table", which) if key.startswith("table_")] == [f"table_{which}"]


def test_markdown_has_one_cell_per_column() -> None:
    lines = run("--format", "markdown", "--table", "1").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + len(tables.table_1(PRESETS["gpt2"])) + 2
    assert {line.count("|") for line in rows} == {8}


def test_every_equation_id_of_the_tables_is_on_a_line_of_the_code() -> None:
    source = Path(onfoot.__file__).parent
    in_code: set[str] = set()
    for folder in ("ops", "models"):
        for path in (source / folder).glob("*.py"):
            for ids in re.findall(r"# eq ([\w.]+(?:, [\w.]+)*)", path.read_text(encoding="utf-8")):
                in_code.update(ids.rstrip(".").split(", "))
    for config in (PRESETS["gpt2"], ODD, preset("gpt2", activation_function="relu"), preset("gpt2", causal=False)):
        used = {one for formula in tables.formulas(config).values() for one in formula.equations}
        assert used <= in_code, used - in_code
