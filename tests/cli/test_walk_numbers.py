"""Every number of `onfoot walk`: each array against PyTorch's autograd, and what is printed against the arrays."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from onfoot.cli import app
from onfoot.cli.walk import SMALL
from onfoot.config import GPT2Config
from onfoot.explore.walk import small_model
from oracles import gpt2_loss_and_grads

UNTIED = ["--n-layer", "2", "--untied", "--lm-head-bias", "--qk-head-dim", "3", "--seed", "4"]
CONFIG = GPT2Config(
    n_layer=2, n_embd=8, n_head=2, vocab_size=10, n_positions=8, tie_word_embeddings=False, lm_head_bias=True,
    qk_head_dim=3,
)  # fmt: skip
TOKENS = [3, 1, 4, 1, 5]


def walk(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["walk", "--format", "json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def steps(data: dict[str, Any], symbol: str, block: int | None = None, head: int | None = None) -> list[Any]:
    sections = [s for s in data["sections"] if (block is None or s["block"] == block) and head in (None, s["head"])]
    return [step for section in sections for step in section["steps"] if step["symbol"] == symbol]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return walk(*UNTIED)


def test_the_parameters_are_away_from_their_initial_values() -> None:
    params = small_model(SMALL, 0).params
    for name, value_ in params.items():
        if value_.ndim == 2:
            assert 0.3 < value_.std() < 0.7, name
        else:
            mean = 1 if name.endswith(".weight") else 0
            assert abs(value_.mean() - mean) < 0.3 and 0.05 < value_.std() < 0.5, name
    other = small_model(SMALL, 1).params
    assert all((params[name] != other[name]).any() for name in params)


def test_every_gradient_of_a_parameter_is_autograds(data: dict[str, Any]) -> None:
    model = small_model(CONFIG, 4)
    targets = np.array([[*TOKENS[1:], -100]])
    loss, grads = gpt2_loss_and_grads(model.params, CONFIG, np.array([TOKENS]), targets)
    assert data["loss"] == pytest.approx(loss, rel=1e-12)
    seen = set()
    for section in data["sections"]:
        for step in section["steps"]:
            if "parameter" not in step:
                continue
            name, _, part = step["parameter"].partition("[")
            right = grads[name]
            if part:
                begin, end = map(int, re.findall(r"(\d+):(\d+)", part)[0])
                right = right[..., begin:end]
            if step["symbol"] in ("∂w_11", "∂b_11"):
                right = right.T
            found = np.array(step["value"])
            assert found.shape == right.shape, step["symbol"]
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-12, err_msg=step["symbol"])
            seen.add((step["parameter"], step["symbol"]))
    width = 2 * (2 * 3) + 8
    covered = np.zeros((2, width))
    for parameter, _ in seen:
        if part := re.fullmatch(r"transformer\.h\.(\d)\.attn\.c_attn\.weight\[\.\.\., (\d+):(\d+)\]", parameter):
            covered[int(part[1]), int(part[2]) : int(part[3])] += 1
    assert (covered == 1).all()  # every column of every block belongs to one head
    assert {name.split("[")[0] for name, _ in seen} == set(model.params)


def test_a_heads_arrays_are_made_of_its_own_columns(data: dict[str, Any]) -> None:
    params = small_model(CONFIG, 4).params
    for b in range(2):
        a2 = np.array(steps(data, "a_2", b)[0]["value"])
        qkv = a2 @ params[f"transformer.h.{b}.attn.c_attn.weight"] + params[f"transformer.h.{b}.attn.c_attn.bias"]
        out = np.array(steps(data, "a_3", b)[0]["value"])
        for h in range(2):
            q, k, v = qkv[:, 3 * h : 3 * h + 3], qkv[:, 6 + 3 * h : 9 + 3 * h], qkv[:, 12 + 4 * h : 16 + 4 * h]
            one = {
                s: np.array(steps(data, s, b, h)[0]["value"], dtype=float) for s in ("q", "k", "v", "ρ_raw", "ρ_scaled")
            }
            for found, right in ((one["q"], q), (one["k"], k), (one["v"], v), (one["ρ_raw"], q @ k.T)):
                np.testing.assert_allclose(found, right, rtol=1e-10, atol=1e-14)
            np.testing.assert_allclose(one["ρ_scaled"], q @ k.T / math.sqrt(3), rtol=1e-10, atol=1e-14)
            masked = np.array(steps(data, "ρ_causal", b, h)[0]["value"], dtype=object)
            above = np.triu(np.ones((5, 5), bool), 1)
            assert all(x is None for x in masked[above]) and not any(x is None for x in masked[~above])
            np.testing.assert_allclose(masked[~above].astype(float), one["ρ_scaled"][~above], rtol=1e-12)
            rho = torch.softmax(torch.tensor(np.where(above, -np.inf, one["ρ_scaled"])), -1).numpy()
            np.testing.assert_allclose(np.array(steps(data, "ρ", b, h)[0]["value"]), rho, rtol=1e-10, atol=1e-14)
            mixed = np.array(steps(data, "a_3^h", b, h)[0]["value"])
            np.testing.assert_allclose(mixed, rho @ v, rtol=1e-10, atol=1e-14)
            np.testing.assert_array_equal(mixed, out[:, 4 * h : 4 * h + 4])
            raw = np.array(steps(data, "Δ_raw", b, h)[0]["value"])
            scaled = np.array(steps(data, "Δ_scaled", b, h)[0]["value"])
            np.testing.assert_allclose(raw, scaled / math.sqrt(3), rtol=1e-12, atol=1e-18)


def test_norms_and_losses_are_margins_of_their_rows(data: dict[str, Any]) -> None:
    for b in range(2):
        for i in (1, 5):
            a = np.array(steps(data, f"a_{i}", b)[0]["value"])
            (normed,) = steps(data, f"ā_{i}", b)
            sigma = np.sqrt(a.var(axis=-1) + CONFIG.layer_norm_epsilon)
            assert normed["margin"]["label"] == "σ"
            np.testing.assert_allclose(normed["margin"]["values"], sigma, rtol=1e-12)
            np.testing.assert_allclose(normed["value"], (a - a.mean(-1, keepdims=True)) / sigma[:, None], rtol=1e-9)
    logits = torch.tensor(steps(data, "a_12")[0]["value"], dtype=torch.float64)
    (predicted,) = steps(data, "y_pred")
    np.testing.assert_allclose(predicted["value"], logits.softmax(-1).numpy(), rtol=1e-10)
    np.testing.assert_allclose(predicted["margin"]["values"], 1, rtol=1e-12)
    goals = torch.tensor([*TOKENS[1:], -100])
    losses = torch.nn.functional.cross_entropy(logits, goals, reduction="none", ignore_index=-100).numpy()
    np.testing.assert_allclose(np.array(steps(data, "ℓ")[0]["value"]), losses, rtol=1e-10)
    assert data["divisor"] == 4 and data["loss"] == pytest.approx(losses.sum() / 4, rel=1e-12)
    assert steps(data, "y_gt")[0]["value"] == goals.tolist()


def test_blocks_run_forward_and_then_backward_in_reverse(data: dict[str, Any]) -> None:
    order = [(s["direction"], s["block"]) for s in data["sections"] if s["block"] is not None]
    assert list(dict.fromkeys(order)) == [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]


def test_what_is_printed_are_the_arrays(data: dict[str, Any]) -> None:
    output = CliRunner().invoke(app, ["walk", *UNTIED, "--full"]).stdout
    assert f"loss {data['loss']:.6f}" in output.splitlines()
    errors = [s["check"]["error"] for section in data["sections"] for s in section["steps"] if "check" in s]
    assert len(errors) == data["checks"]
    assert f"all {len(errors)} checks passed; largest relative error {max(errors):.0e}" in output
    for symbol in ("∂w_11", "Δ_12", "a_1"):
        (step,) = steps(data, symbol)[:1]
        first = np.atleast_2d(np.array(step["value"]))[0]
        line = "  ".join(f"{x:.4f}" if x else "0" for x in first).split()
        assert any(text.split("│")[0].split() == line for text in output.splitlines()), symbol


def test_other_seeds_and_sums_give_other_numbers() -> None:
    first, second, summed = walk(), walk("--seed", "1"), walk("--sum")
    assert first["loss"] != second["loss"] and first["seed"] == 0 and second["seed"] == 1
    assert summed["loss"] == pytest.approx(4 * first["loss"], rel=1e-12)
    assert second["loss"] == pytest.approx(small_model(SMALL, 1).loss(np.array([TOKENS])), rel=1e-12)


def test_a_matrix_that_just_fits_is_shown_in_full_with_its_margins() -> None:
    from onfoot.cli.matrix import matrix_lines

    x = np.arange(1, 145).reshape(12, 12)
    lines = matrix_lines(x, ("Σ", x.sum(axis=1)))
    assert [line.split("│")[0].split() for line in lines] == [[str(n) for n in row] for row in x]
    assert [line.split("Σ")[1].strip() for line in lines] == [str(n) for n in x.sum(axis=1)]
    cut = matrix_lines(np.arange(1, 14))
    assert cut[0].split() == ["1", "2", "3", "4", "5", "6", "7", "8", "9", "…", "12", "13"]


def test_one_token_has_no_target() -> None:
    result = CliRunner().invoke(app, ["walk", "--tokens", "3"])
    assert result.exit_code == 2 and "1 token has no target" in result.output
