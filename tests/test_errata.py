"""Every erratum of docs/errata.md: the literal formula is wrong, the right one agrees, and the page says so."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from errata import (
    attention,
    measure_attention,
    norm_lora_network,
    note_on_qk,
    note_with_listings,
)
from errata.catalogue import CATALOGUE
from errata.oracle import attention_data, attention_gradients, draw, multiplications
from errata.page import AGREES, PAGE, refreshed
from errata.registry import ERRATA, KINDS, Erratum, Line
from onfoot import preset, tables
from onfoot.check.mistakes.embedding import table_gradient_by_assignment
from onfoot.ops import (
    Head,
    attention_backward,
    attention_forward,
    embedding_backward,
    embedding_forward,
    head_forward,
    lora_backward,
    lora_forward,
    lora_linear_backward,
    lora_linear_forward,
)
from onfoot.ops.attention import attention_weights, softmax_backward
from oracles import autograd, relative_error

WRONG = 1e-4  # the smallest literal error is GELU's mixed derivative, 6e-4; a right formula stays below 1e-14

LINES = [(one, i, line) for one in CATALOGUE for i, line in enumerate(one.measure())]


def measured(errors: bool) -> list:
    """The lines that are relative errors, or the others: counts, shapes, names of errors."""
    chosen = [(one, i, line) for one, i, line in LINES if isinstance(line.literal, float) == errors]
    return [pytest.param(one, i, id=f"{one.id}-{line.what}") for one, i, line in chosen]


def the_line(id: str, words: str) -> Line:
    """The one line of an erratum that begins with these words."""
    (line,) = (line for line in ERRATA[id].measure() if line.what.startswith(words))
    return line


@pytest.mark.parametrize(("erratum", "index"), measured(errors=True))
def test_the_literal_formula_is_wrong_and_the_right_one_agrees(erratum: Erratum, index: int) -> None:
    line = erratum.measure()[index]
    assert line.literal > WRONG
    assert isinstance(line.right, float) and line.right <= AGREES


@pytest.mark.parametrize(("erratum", "index"), measured(errors=False))
def test_the_literal_formula_does_something_else_than_the_right_one(erratum: Erratum, index: int) -> None:
    line = erratum.measure()[index]
    assert (line.literal, line.right) == HAPPENS[erratum.id, line.what]


def test_nearly_every_erratum_has_an_error_that_is_measured() -> None:
    without = {one.id for one in CATALOGUE} - {one.id for one, _, line in LINES if isinstance(line.literal, float)}
    assert without == {"E4", "E8", "E13", "E23", "E31"}  # nan, an exception, noise, nan and inf, two counts


HAPPENS = {
    ("E4", "49 weights, (1 − m)·(−inf) added"): ("49 nan", "0 nan"),
    ("E4", "49 weights, rows that see nothing"): ("49 nan", "0 nan"),
    ("E4", "the same with −1e9 in float16"): ("49 nan", "0 nan"),
    ("E8", "a w_v for d = 6, d_h = 4"): ("ValueError", "(7, 4)"),
    ("E13", "largest |b_k| after 20 steps of Adam at 1e-3, float32"): ("> 1e-3", "exactly 0"),
    ("E15", "y(t_next) for n_T = 7, d_h = 4"): ("(8, 4)", "(4,)"),
    ("E16", "multiplications to generate 128 tokens over those for 64"): ("×2", "×4"),
    ("E21", "y_pred − y_gt, n_T rows and n_T − 1 rows"): ("ValueError", "(2, 7, 11)"),
    ("E22", "ids 1 and n_vocab in a table whose rows count from 0"): ("IndexError", "(2, 4)"),
    ("E23", "loss at logits of about ±1000, exp as it stands"): ("nan", 0.0),
    ("E23", "the same, maximum taken off, then log"): ("inf", 0.0),
    ("E26", "shape of oheᵗΔ_1 for 3 sequences, n_context = 9, d = 4"): ("(3, 9, 4)", "(9, 4)"),
    ("E28", "the 8 features of a constant token, no eps"): ("8 nan", "0 nan"),
    ("E28", "shape of ∂w, diag as a maker of matrices"): ("(8, 8)", "(8,)"),
    ("E31", "parameters of LoRA on every layer of GPT-2, r = 16"): (12_451_008, 3_470_608),
    ("E31", "multiplications of eq 44 at the logits, 1,024 tokens"): (40_141_271_040, 835_993_600),
    ("E33", "np.softmax of scores 7 × 7"): ("AttributeError", "(7, 7)"),
    ("E33", "dW_Q by np.dot of arrays (d, n, batch) and (batch, n, d)"): ("ValueError", "(8, 8)"),
    ("E37", "shape of the Jacobian, a matrix product, n = 7"): ("(7,)", "(7, 7)"),
    ("E38", "shape of dK, n = 7, d_k = 5"): ("(5, 7)", "(7, 5)"),
    ("E40", "10 tokens of width 12 split into 8 heads"): ("(1, 8, 15, 1)", "ValueError"),
    ("E43", "shape of ∂Z/∂K, n = 5, d_k = 3"): ("(3, 5)", "(5, 5, 5, 3)"),
    ("E43", "dZ · ∂Z/∂K, n = 5, d_k = 3"): ("ValueError", "(5, 3)"),
}


CORES = {
    "without_keepdims": attention.without_keepdims,
    "over_tokens": attention.over_tokens,
    "with_hadamard": attention.with_hadamard,
    "minus_mean": note_with_listings.minus_mean,
    "matrix_products": note_with_listings.matrix_products,
    "row_index": note_with_listings.row_index,
    "keys_transposed": note_with_listings.keys_transposed,
    "through_weights_not_scores": note_on_qk.through_weights_not_scores,
    "without_scale": note_on_qk.without_scale,
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CORES)
def test_each_mistaken_core_has_the_right_shapes_the_right_dv_and_a_wrong_dk(name: str, causal: bool) -> None:
    q, k, v, dout = attention_data(n=5, d_rho=5)  # n = d_ρ, where a transposed dk has the right shape
    _, dk, dv = attention_gradients(q, k, v, dout, causal)
    mistaken = CORES[name](q, k, v, dout, causal)
    assert [x.shape for x in mistaken] == [q.shape, k.shape, v.shape]
    assert relative_error(mistaken[1], dk) > 0.1
    assert relative_error(mistaken[2], dv) <= AGREES


# What numbers alone do not say


def test_e1_the_product_mask_lets_the_first_token_see_the_future() -> None:
    q, k, _, _ = attention_data()
    literal, right = attention.weights_masked_by_product(q, k), attention_weights(q, k)
    assert (literal[..., 0, 1:] > 0).all()
    assert (right[..., 0, 1:] == 0).all() and (right[..., 0, 0] == 1).all()


def test_e2_with_the_product_mask_the_bias_of_keys_is_live() -> None:
    q, k, v, _ = attention_data()
    shift = np.ones(k.shape[-1])
    literal = attention.attention_masked_by_product
    assert relative_error(literal(q, k + shift, v), literal(q, k, v)) > 0.01
    assert relative_error(attention_forward(q, k + shift, v)[0], attention_forward(q, k, v)[0]) <= AGREES


def test_e3_rows_masked_after_softmax_sum_to_less_than_one() -> None:
    q, k, _, _ = attention_data()
    ones = np.ones((*k.shape[:-1], 1))
    sums = attention.attention_masked_after_softmax(q, k, ones)
    assert (sums[..., :-1, :] < 1).all()


def test_e15_the_rows_of_the_printed_shape_add_up_to_the_new_token() -> None:
    q, k, v = draw(15, (1, 5), (8, 5), (8, 4))
    rows = attention.cached_output_with_a_row_for_each_token(q, k, v)
    assert rows.shape == (8, 4)
    assert relative_error(rows.sum(axis=0), attention_forward(q, k, v)[0][0]) <= AGREES


def test_e17_shapes_tell_what_is_meant() -> None:
    a, w_q, w_k, v, dout = draw(17, (1, 7, 6), (6, 5), (6, 5), (1, 7, 4), (1, 7, 4))
    assert attention.delta_q(a, w_q, w_k, v, dout).shape == a.shape != (a @ w_q).shape


def test_e10_a_third_token_moves_a_weight_but_not_a_raw_score() -> None:
    q, k, _, _ = attention_data()

    def raw_31(k: torch.Tensor) -> torch.Tensor:
        return (torch.as_tensor(q) @ k.mT)[..., 2, 0]

    gradient = autograd(raw_31, [k], np.ones(k.shape[:2]))[0]
    assert (gradient[..., 1, :] == 0).all() and (gradient[..., 0, :] != 0).all()
    moved = k.copy()
    moved[..., 1, :] += 0.1
    assert (attention_weights(q, moved)[..., 2, 0] != attention_weights(q, k)[..., 2, 0]).all()


def test_e13_adam_makes_steps_out_of_the_noise_of_a_vanishing_gradient() -> None:
    a, w_q, w_k, w_v, b, dy = (
        x.astype(np.float32) for x in draw(13, (4, 32, 16), (16, 8), (16, 8), (16, 8), (8,), (4, 32, 8))
    )
    _, saved = head_forward(a, Head(w_q, b, w_k, b, w_v, b))
    noise = np.abs(attention.key_bias_gradient_summed(saved.q, saved.k, saved.v, dy)).max()
    _, dk, _ = attention_backward(dy, attention_forward(saved.q, saved.k, saved.v)[1])
    assert 0 < noise < 1e-4 * np.abs(dk).max()  # rounding, nothing else
    assert measure_attention.largest_key_bias_after_adam(exact=False) > 100 * noise
    assert measure_attention.largest_key_bias_after_adam(exact=True) == 0


def test_e16_a_cache_is_linear_a_token_and_quadratic_in_all() -> None:
    costs = [measure_attention.step_multiplications(held) for held in range(1, 129)]
    assert {after - before for before, after in pairwise(costs)} == {64 + 64}
    assert sum(costs) / sum(costs[:64]) == pytest.approx(4, rel=1e-2)


def test_e18_softmax_takes_the_symmetry_away() -> None:
    q, _, _, _ = attention_data()
    raw, rho = q @ np.swapaxes(q, -1, -2), attention.weights_of_queries_alone(q)
    np.testing.assert_allclose(raw, np.swapaxes(raw, -1, -2), rtol=1e-12)
    assert not np.allclose(rho, np.swapaxes(rho, -1, -2), rtol=0.01)


def test_e20_the_undivided_gradient_is_too_large_by_the_number_of_targets() -> None:
    assert the_line("E20", "gradient of the mean: Δ_12 undivided").literal == pytest.approx(12 - 1)
    assert the_line("E20", "gradient of the mean: divided by all 14").literal == pytest.approx(1 - 12 / 14)


def test_e24_only_repeated_tokens_are_lost() -> None:
    ids, (dy,) = np.array([2, 0, 2, 1]), draw(24, (4, 3))
    literal = table_gradient_by_assignment(ids, dy, 4)
    right = embedding_backward(dy, embedding_forward(ids, np.zeros((4, 3)))[1])
    np.testing.assert_array_equal(literal[[0, 1, 3]], right[[0, 1, 3]])
    np.testing.assert_array_equal(literal[2], dy[2])
    np.testing.assert_array_equal(right[2], dy[0] + dy[2])


def test_e29_a_fresh_adapter_sends_nothing_down_by_the_literal_formula() -> None:
    x, weight, down, up, dy = draw(29, (7, 6), (6, 9), (6, 2), (2, 9), (7, 9))
    nothing = np.zeros_like(up)
    assert not norm_lora_network.lora_input_gradient_without_frozen_path(dy, down, nothing, 2.0).any()
    dx, ddown, dup = lora_linear_backward(dy, lora_linear_forward(x, weight, None, down, nothing, 2.0)[1])
    assert dx.any() and dup.any() and not ddown.any()


def test_e29_an_adapter_of_zeros_never_learns() -> None:
    x, weight, dy = draw(29, (7, 6), (6, 9), (7, 9))
    _, ddown, dup = lora_linear_backward(
        dy, lora_linear_forward(x, weight, None, np.zeros((6, 2)), np.zeros((2, 9)), 2.0)[1]
    )
    assert not ddown.any() and not dup.any()


def test_e31_the_printed_count_has_the_logits_once_per_block() -> None:
    line = the_line("E31", "parameters")
    assert line.literal - line.right == 11 * 16 * (768 + 50_257)
    assert tables.lora_total(tables.lora_rows(preset("paper-12"), r=16))[1] == line.right


def test_e31_the_printed_order_of_products_costs_48_times_as_much() -> None:
    line = the_line("E31", "multiplications")
    assert line.literal / line.right == pytest.approx(48, rel=1e-2)
    x, down, up, dy = draw(31, (7, 6), (6, 2), (2, 9), (7, 9))
    dx = lora_backward(dy, lora_forward(x, down, up, 2.0)[1])[0]
    np.testing.assert_allclose(norm_lora_network.lora_input_gradient_without_frozen_path(dy, down, up, 2.0), dx)

    def ours(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> None:
        lora_backward(dy, lora_forward(x, down, up, 2.0)[1])

    all_of_it = multiplications(ours, (1024, 768), (768, 16), (16, 50257), (1024, 50257))
    assert all_of_it == 3 * line.right  # x d u once, and in the backward pass dx, and ∂d and ∂u


def test_e33_np_dot_of_equal_batch_and_tokens_returns_four_axes() -> None:
    x, dq = draw(33, (5, 5, 8), (5, 5, 8))
    assert np.dot(x.T, dq).shape == (8, 5, 5, 8)


@pytest.mark.parametrize("causal", [True, False])
def test_e34_passes_the_row_sum_test_and_the_key_bias_test_and_is_wrong(causal: bool) -> None:
    q, k, v, dout = attention_data()
    drho, rho = dout @ np.swapaxes(v, -1, -2), attention_weights(q, k, causal)
    ds = note_with_listings.softmax_backward_minus_mean(drho, rho)
    np.testing.assert_allclose(ds.sum(axis=-1), 0, atol=1e-13)  # eq 26
    dq, dk, _ = note_with_listings.minus_mean(q, k, v, dout, causal)
    np.testing.assert_allclose(dk.sum(axis=-2), 0, atol=1e-12)  # eq 29
    dq_right, dk_right, _ = attention_gradients(q, k, v, dout, causal)
    assert relative_error(ds, softmax_backward(drho, rho)) > 0.1
    assert relative_error(dq, dq_right) > 0.1 and relative_error(dk, dk_right) > 0.1


def test_e34_sends_a_gradient_to_masked_scores() -> None:
    q, k, v, dout = attention_data()
    drho, rho = dout @ np.swapaxes(v, -1, -2), attention_weights(q, k)
    future = np.triu(np.ones(rho.shape[-2:]), 1) > 0
    assert (note_with_listings.softmax_backward_minus_mean(drho, rho)[..., future] != 0).all()
    assert (softmax_backward(drho, rho)[..., future] == 0).all()


def test_e35_the_matrix_products_are_right_for_a_single_query() -> None:
    q, k, v, dout = (x[..., :1, :] if i in (0, 3) else x for i, x in enumerate(attention_data()))
    drho, rho = dout @ np.swapaxes(v, -1, -2), attention_weights(q, k, causal=False)
    literal = note_with_listings.softmax_backward_matrix_products(drho, rho)
    assert relative_error(literal, softmax_backward(drho, rho)) <= AGREES


def test_e37_a_row_and_a_column_broadcast_give_the_jacobian() -> None:
    weights = np.array([0.2, 0.5, 0.3])
    broadcast = weights[None, :] * (np.eye(3) - weights[:, None])
    np.testing.assert_allclose(broadcast, note_with_listings.softmax_jacobian(weights), atol=1e-15)


def test_e42_is_wrong_in_size_and_not_in_direction() -> None:
    q, k, v, dout = attention_data()
    literal = note_on_qk.without_scale(q, k, v, dout)[0]
    right = attention_gradients(q, k, v, dout, causal=False)[0]
    assert relative_error(attention_backward(dout, attention_forward(q, k, v, causal=False)[1])[0], right) <= AGREES
    assert relative_error(literal / np.sqrt(q.shape[-1]), right) <= AGREES


# The catalogue and the page


def test_the_catalogue_is_complete() -> None:
    assert [one.id for one in CATALOGUE] == [f"E{i}" for i in range(1, 44) if i not in (5, 25)]
    assert all(set(one.kind.split("/")) <= set(KINDS) for one in CATALOGUE)


def test_the_figures_of_the_page_are_those_that_are_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert refreshed(text) == text, "run `PYTHONPATH=tests python -m errata`"


def test_a_figure_changed_by_hand_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    changed = text.replace("12,451,008", "12,451,009").replace("| 0.66 |", "| 0.67 |")
    assert changed != text and refreshed(changed) == text


@pytest.mark.parametrize("erratum", CATALOGUE, ids=lambda one: one.id)
def test_every_erratum_has_its_section(erratum: Erratum) -> None:
    text = PAGE.read_text(encoding="utf-8")
    opening = f'<a id="{erratum.anchor}"></a>\n### {erratum.id} · {erratum.title}\n'
    assert text.count(opening) == 1
    section = text.split(opening)[1].split("<a id=")[0]
    for part in ("**Literal.**", "**Why it misleads.**", "**Right.**", f"<!-- measured: {erratum.anchor} -->"):
        assert section.count(part) == 1
    assert re.search(r"\]\(equations/\w+\.md", section)
