"""`onfoot walk`: its numbers are the model's; its checks pass for right gradients and fail for wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from onfoot import engine
from onfoot.cli import app
from onfoot.cli.matrix import matrix_lines
from onfoot.cli.walk import SMALL
from onfoot.explore.walk import small_model
from onfoot.ops.activation import gelu_erf_backward, gelu_tanh_backward
from onfoot.ops.attention import attention_backward
from onfoot.ops.cross_entropy import cross_entropy_backward
from onfoot.ops.layer_norm import layer_norm_backward
from onfoot.ops.linear import linear_backward
from onfoot.probe import derivative


def walk(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["walk", "--format", "json", *arguments])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def steps(data: dict[str, Any], symbol: str) -> list[dict[str, Any]]:
    return [step for section in data["sections"] for step in section["steps"] if step["symbol"] == symbol]


def values(data: dict[str, Any], symbol: str) -> list[np.ndarray]:
    return [np.array(step["value"], dtype=float) for step in steps(data, symbol)]


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return walk()


VARIANTS = [
    "--activation relu",
    "--activation gelu --n-layer 2 --untied --lm-head-bias",
    "--no-causal --untied",
    "--n-embd 6 --n-head 3 --head-dim 3 --qk-head-dim 5 --n-inner 7",
    "--sum --seed 5 --tokens 7,7,7,7",
    "--n-head 1 --tokens 2,9",
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_check_passes_in_every_variant(variant: str) -> None:
    data = walk(*variant.split())
    errors = [s["check"]["error"] for section in data["sections"] for s in section["steps"] if "check" in s]
    assert data["failed"] == []
    assert len(errors) == data["checks"] > 40
    assert max(errors) < 1e-7


def test_every_error_signal_and_every_parameter_is_checked(small: dict[str, Any]) -> None:
    for section in small["sections"]:
        for step in section["steps"]:
            assert ("check" in step) == (section["direction"] == "backward"), step["symbol"]
    checked = {s.get("parameter", "").split("[")[0] for sec in small["sections"] for s in sec["steps"]} - {""}
    assert checked == set(small_model(SMALL, 0).params)
    assert {f"Δ_{i}" for i in range(13)} <= {s["symbol"] for sec in small["sections"] for s in sec["steps"]}


def test_the_numbers_are_those_of_the_model(small: dict[str, Any]) -> None:
    tokens = np.array([[3, 1, 4, 1, 5]])
    trace = small_model(SMALL, 0).trace(tokens, input_gradient=True)
    assert small["loss"] == trace.loss == values(small, "L")[0]
    for i in range(1, 11):
        np.testing.assert_array_equal(values(small, f"a_{i}")[0], trace.blocks[0].a[i][0])
        np.testing.assert_array_equal(values(small, f"Δ_{i}")[0], trace.blocks[0].delta[i][0])
    np.testing.assert_array_equal(values(small, "Δ_0")[0], trace.delta[0][0])
    np.testing.assert_array_equal(values(small, "∂w_6")[0], trace.grads["transformer.h.0.mlp.c_fc.weight"])


def test_heads_show_their_weights_and_their_error_signals_with_row_sums(small: dict[str, Any]) -> None:
    for rho, causal in zip(steps(small, "ρ"), steps(small, "Δ_causal"), strict=True):
        np.testing.assert_allclose(rho["margin"]["values"], 1, rtol=1e-14)
        np.testing.assert_allclose(causal["margin"]["values"], 0, atol=1e-16)
        for step in (rho, causal):
            assert not np.triu(np.array(step["value"]), 1).any()
    assert len(steps(small, "ρ")) == SMALL.n_head
    masked = np.array(steps(small, "ρ_causal")[0]["value"], dtype=object)
    assert (masked[np.triu_indices(5, 1)] == None).all()  # noqa: E711


def test_heads_add_up_to_the_error_signal_of_attentions_input(small: dict[str, Any]) -> None:
    np.testing.assert_allclose(sum(values(small, "Δ_2^h")), values(small, "Δ_2")[0], rtol=1e-12, atol=1e-15)


def test_the_two_paths_of_a_tied_table_add_up(small: dict[str, Any]) -> None:
    looked_up, read_out, both = values(small, "∂w_tok")
    np.testing.assert_allclose(looked_up + read_out, both, rtol=1e-12, atol=1e-15)
    assert abs(looked_up).max() > 0.1
    assert abs(read_out).max() > 0.1


def test_sum_is_mean_times_the_number_of_targets(small: dict[str, Any]) -> None:
    summed = walk("--sum")
    assert summed["divisor"] == 1
    assert small["divisor"] == 4
    np.testing.assert_allclose(values(summed, "Δ_1")[0], 4 * values(small, "Δ_1")[0], rtol=1e-12)


def test_steps_are_in_the_order_of_both_passes() -> None:
    data = walk("--n-layer", "2")
    symbols = [(section["block"], step["symbol"]) for section in data["sections"] for step in section["steps"]]
    down = [(0, "a_1"), (0, "a_10"), (1, "a_1"), (1, "a_10"), (None, "a_12"), (None, "L")]
    up = [(None, "Δ_12"), (1, "Δ_10"), (1, "∂w_8"), (1, "Δ_8"), (1, "Δ_1"), (0, "Δ_10"), (0, "Δ_1"), (None, "Δ_0")]
    places = [symbols.index(one) for one in down + up]
    assert places == sorted(places)


def test_the_printed_walk_shows_formulas_loss_and_verdict() -> None:
    out = CliRunner().invoke(app, ["walk"]).stdout
    assert "Δ_5 = Δ_10 + LNᵇ_5(Δ_6)" in out
    assert "eq NET.1, 40" in out
    assert "LNᵇ_5(Δ_6) = [x − mean x − ā_5 ∘ mean(ā_5 ∘ x)] / σ_5,  x = Δ_6 ∘ ~w_5" in out
    loss, verdict = out.splitlines()[-2:]
    assert loss.startswith("loss 2.")
    assert verdict.startswith("✓ all 57 checks passed")
    assert "…" in out
    assert "…" not in CliRunner().invoke(app, ["walk", "--full"]).stdout


# Planted bugs, each one that people really make: (the pair's name, the wrong backward, what must fail, what must not)


def averaged_bias(dy: Any, saved: Any) -> Any:
    dx, dweight, dbias = linear_backward(dy, saved)
    return dx, dweight, None if dbias is None else dbias / dy.shape[-2]


def half_weight(dy: Any, saved: Any) -> Any:
    dx, dweight, dbias = linear_backward(dy, saved)
    return dx, dweight / 2, dbias


def weight_outside_the_means(dy: Any, saved: Any) -> Any:
    _, dweight, dbias = layer_norm_backward(dy, saved)
    normed, rstd, weight = saved
    means = dy.mean(axis=-1, keepdims=True) + normed * (normed * dy).mean(axis=-1, keepdims=True)
    return (dy - means) * weight * rstd, dweight, dbias


def unscaled_attention(dy: Any, saved: Any) -> Any:
    dq, dk, dv = attention_backward(dy, saved)
    return dq * saved.q.shape[-1] ** 0.5, dk, dv


def lost_repeats(dy: Any, saved: Any) -> Any:
    out = np.zeros((saved.n_rows, dy.shape[-1]))
    out[saved.ids] = dy
    return out


def divided_by_all_tokens(dloss: Any, saved: Any) -> Any:
    return cross_entropy_backward(dloss, saved) * saved.divisor / len(saved.targets)


BUGS: dict[str, tuple[str, Callable[..., Any], str, str]] = {
    "a bias's gradient averaged": ("linear_backward", averaged_bias, "∂b_8", "∂w_8"),
    "a weight's gradient halved": ("linear_backward", half_weight, "∂w_3", "Δ_3"),
    "γ outside the means": ("layer_norm_backward", weight_outside_the_means, "Δ_10", "Δ_11"),
    "1/√d_ρ forgotten": ("attention_backward", unscaled_attention, "Δ_2", "Δ_3"),
    "repeated tokens lost": ("embedding_backward", lost_repeats, "∂w_tok", "Δ_1"),
    "divided by n_T": ("cross_entropy_backward", divided_by_all_tokens, "Δ_12", ""),
    "the other GELU's derivative": ("gelu_tanh_backward", gelu_erf_backward, "Δ_7", "Δ_8"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, hit, spared = BUGS[bug]
    monkeypatch.setattr(engine, "OPS", {**engine.OPS, name: wrong})
    failed = {one.split(" ")[0] for one in walk(status=1)["failed"]}
    assert hit in failed
    assert spared not in failed


def test_a_wrong_error_signal_inside_a_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def minus_the_mean(drho: Any, rho: Any) -> Any:
        """A published mistake whose rows sum to 0 as they should."""
        product = drho * rho
        return product - product.mean(axis=-1, keepdims=True)

    monkeypatch.setattr("onfoot.models.trace.softmax_backward", minus_the_mean)
    failed = {one.split(" ")[0] for one in walk(status=1)["failed"]}
    assert {"Δ_causal", "Δ_scaled", "Δ_raw", "Δ_q", "Δ_k", "Δ_2^h"} == failed


def test_a_planted_bug_is_marked_where_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(dy: Any, saved: Any) -> Any:
        return -gelu_tanh_backward(dy, saved)

    monkeypatch.setattr(engine, "OPS", {**engine.OPS, "gelu_tanh_backward": flipped})
    result = CliRunner().invoke(app, ["walk"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("Δ_7 ="))
    assert lines[row].endswith("✗ 2e+00") and lines[row + 1].startswith("  formula ")
    assert "checks failed: Δ_7 (block 1 of 1, after attention), " in result.stdout.splitlines()[-1]


def test_a_gradient_that_is_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(dy: Any, saved: Any) -> Any:
        return gelu_tanh_backward(dy, saved) * np.nan

    monkeypatch.setattr(engine, "OPS", {**engine.OPS, "gelu_tanh_backward": broken})
    result = CliRunner().invoke(app, ["walk"])
    assert result.exit_code == 1
    assert "Δ_7 (block 1" in result.stdout.splitlines()[-1]


def test_the_derivative_is_exact_for_smooth_functions_and_steps_around_a_kink() -> None:
    assert abs(derivative(lambda x: np.exp(3 * x)) - 3) < 1e-9
    assert abs(derivative(lambda x: max(x - 5e-4, 0) + 2 * x) - 2) < 1e-9


def test_matrices_are_aligned_exact_about_zero_and_abbreviated() -> None:
    assert matrix_lines(np.array([[1.5, -0.25], [0, 1e-9]])) == [" 1.5000  -0.2500", "      0   0.0000"]
    assert matrix_lines(np.array([[-1e-9, -np.inf]])) == ["0.0000      −∞"]
    assert matrix_lines(np.array([1.0]), margin=("Σ", np.array(1.0))) == ["1.0000  │ Σ 1.0000"]
    lines = matrix_lines(np.arange(400).reshape(20, 20))
    assert len(lines) == 12
    assert lines[0].split() == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "…", "18", "19"]
    assert set(lines[9].split()) == {"⋮"}
