"""What the mathematics says must hold, whatever the numbers: invariants of the layers and of the whole network.

Parameters are away from initial values (norms not 1, biases not 0), upstream gradients are random, sizes are odd. The
oracles are PyTorch's own layers and autograd, finite differences, sums written out, or a number that must be exactly 0.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import onfoot
import oracles
from onfoot import ops
from onfoot.arrays import to_numpy
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.models.model import Model
from onfoot.models.params import lora_count, shapes
from onfoot.ops import Head
from onfoot.ops.attention import attention_weights, softmax
from oracles import autograd

both = pytest.mark.parametrize("asarray", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
engines = pytest.mark.parametrize("engine", ["numpy", "torch"])
few = settings(max_examples=25)
sizes = st.integers(1, 6)
seeds = st.integers(0, 2**32 - 1)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    oracles.assert_close(to_numpy(got), to_numpy(expected), tolerance)


def assert_zero(x: Any) -> None:
    """Exactly 0, not nearly."""
    assert np.count_nonzero(to_numpy(x)) == 0


def assert_alive(x: Any) -> None:
    """Every element far from rounding noise: what a test of zeros must not be confused with."""
    assert np.abs(to_numpy(x)).min() > 1e-9


def random_head(rng: np.random.Generator, d: int, d_rho: int, d_h: int) -> Head:
    dims = [(d, d_rho), (d_rho,), (d, d_rho), (d_rho,), (d, d_h), (d_h,)]
    return Head(*(rng.normal(size=shape) for shape in dims))


# --- the products of the derivations -------------------------------------------------------------------------------


def frobenius(a: np.ndarray, b: np.ndarray) -> float:
    return sum(a[i, j] * b[i, j] for i in range(a.shape[0]) for j in range(a.shape[1]))


@few
@given(n=sizes, f=sizes, g=sizes, h=sizes, seed=seeds)
def test_frobenius_products_can_be_cycled(n: int, f: int, g: int, h: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c, d = (rng.normal(size=shape) for shape in ((n, f), (n, g), (g, h), (h, f)))
    product = frobenius(a, b @ c @ d)
    for same in (
        np.trace(a.T @ (b @ c @ d)),
        sum(a[i] @ (b @ c @ d)[i] for i in range(n)),  # Σ_rows A ⊖ BCD
        frobenius((b @ c).T @ a, d),
        frobenius(b.T @ a @ d.T, c),
        frobenius(a @ (c @ d).T, b),
    ):
        assert math.isclose(product, same, rel_tol=1e-9, abs_tol=1e-9)
    e = rng.normal(size=(f, n))
    assert math.isclose(frobenius(a, e.T), frobenius(a.T, e), rel_tol=1e-9, abs_tol=1e-9)  # eq 49


@few
@given(n=sizes, f=sizes, seed=seeds)
def test_broadcasts_of_row_products_can_change_sides(n: int, f: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(size=(3, n, n))

    def broadcast(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.array([[x[i] @ y[i]] * n for i in range(n)])

    np.testing.assert_allclose(broadcast(a, b), (a * b) @ np.ones((n, n)), atol=1e-12)  # eq 50
    left, right = frobenius(a * b, broadcast(b, c)), frobenius(broadcast(a, b) * b, c)
    assert math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)  # eq 51
    v = rng.normal(size=(n, f))
    np.testing.assert_allclose(sum((a @ v)[i] for i in range(n)), a.sum(axis=0) @ v, atol=1e-12)  # eq 52


# --- softmax and attention -----------------------------------------------------------------------------------------


@both
def test_softmax_ignores_what_is_added_to_a_whole_row(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    g, h, b = rng.normal(size=(5, 5)), rng.normal(size=(5, 3)), rng.normal(size=3)
    shifted = g + h @ np.broadcast_to(b, (5, 3)).T  # eq 53
    assert_close(softmax(asarray(shifted)), torch.from_numpy(g).softmax(-1), 1e-14)  # eq 54


@few
@given(n=sizes, m=sizes, seed=seeds)
def test_softmax_commutes_with_permutations_of_rows_and_of_columns(n: int, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, rows, columns = rng.normal(size=(n, m)), np.eye(n)[rng.permutation(n)], np.eye(m)[rng.permutation(m)]
    assert_close(softmax(rows @ scores), rows @ softmax(scores), 1e-14)  # eq 55.a
    assert_close(softmax(scores @ columns), softmax(scores) @ columns, 1e-14)  # eq 55.b


@pytest.mark.parametrize("d_rho", [1, 7, 64])
def test_the_variance_of_scores_is_that_of_the_width_and_scaling_removes_it(d_rho: int) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(40_000, 1, d_rho)), rng.normal(size=(40_000, 2, d_rho))
    raw = (q * k).sum(axis=-1)
    assert math.isclose(raw.var(), d_rho, rel_tol=0.06)
    rho = attention_weights(q, k, causal=False)[:, 0]  # (N, 2)
    # log ρ_1 − log ρ_2 is the difference of two scaled scores, each of variance 1
    assert math.isclose((np.log(rho[:, 0]) - np.log(rho[:, 1])).var(), 2, rel_tol=0.06)


@both
def test_tokens_that_see_only_themselves_come_out_as_their_values(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (asarray(rng.normal(size=(2, 5, d))) for d in (3, 3, 4))
    alone, _ = ops.attention_forward(q, k, v, start=asarray(np.arange(5)))
    assert (alone == v).all()
    far = asarray(50 * np.eye(5))  # scores of 0 and 2500/√5: ρ = I to the last bit
    assert (ops.attention_forward(far, far, v, causal=False)[0] == v).all()


@both
def test_non_causal_attention_is_permutation_equivariant_in_both_passes(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    head = Head(*map(asarray, random_head(rng, 5, 3, 4)))
    a, dy, order = rng.normal(size=(7, 5)), rng.normal(size=(7, 4)), rng.permutation(7)
    outcomes = {}
    for causal in (False, True):
        y, saved = ops.head_forward(asarray(a), head, causal)
        da, grads = ops.head_backward(asarray(dy), saved)
        y2, saved2 = ops.head_forward(asarray(a[order]), head, causal)
        da2, grads2 = ops.head_backward(asarray(dy[order]), saved2)
        outcomes[causal] = [(y2, y[order]), (da2, da[order]), *zip(grads2, grads, strict=True)]
    for got, expected in outcomes[False]:
        assert_close(got, expected)  # the output and its gradient are permuted; the parameters' do not change
    for got, expected in outcomes[True][:2]:
        assert not np.allclose(to_numpy(got), to_numpy(expected), rtol=0.1)


def test_two_layers_relate_three_tokens() -> None:
    rng = np.random.default_rng(0)
    a, d = rng.normal(size=(5, 4)), 4
    first, second = (random_head(rng, d, 3, d)._replace(b_v=np.zeros(d)) for _ in range(2))
    middle, _ = ops.head_forward(a, first)
    y, _ = ops.head_forward(middle, second)

    def rho(x: np.ndarray, head: Head) -> np.ndarray:
        scores = torch.from_numpy((x @ head.w_q + head.b_q) @ (x @ head.w_k + head.b_k).T) / math.sqrt(3)
        return scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1).numpy()

    rho1, rho2 = rho(a, first), rho(middle, second)
    for t in range(5):  # eq 20
        pairs = [(alpha, beta) for alpha in range(5) for beta in range(5)]
        expected = sum(rho2[t, i] * rho1[i, j] * (a[j] @ first.w_v @ second.w_v) for i, j in pairs)
        assert_close(y[t], expected)


def test_products_of_random_matrices_explode_and_layer_norm_holds_them() -> None:
    rng = np.random.default_rng(0)
    n, depth = 64, 20
    a = normed = rng.normal(size=(n, n))
    log_variances = []
    for _ in range(depth):
        w = rng.normal(size=(n, n))
        a, _ = ops.linear_forward(a, w)
        normed, _ = ops.layer_norm_forward(ops.linear_forward(normed, w)[0], np.ones(n), np.zeros(n))
        log_variances.append(math.log(a.var()))
    growth = np.polyfit(range(depth), log_variances, 1)[0]
    assert math.isclose(growth, math.log(n), rel_tol=0.02)  # the variance is multiplied by n at every step
    assert math.isclose(normed.var(), 1, rel_tol=1e-3)


# --- biases of a head ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_of_keys_acts_on_nothing_and_its_gradient_is_exactly_zero(asarray: Any, causal: bool) -> None:
    rng = np.random.default_rng(0)
    a, dy = asarray(rng.normal(size=(2, 5, 4))), asarray(rng.normal(size=(2, 5, 3)))
    head = Head(*map(asarray, random_head(rng, 4, 2, 3)))
    y, saved = ops.head_forward(a, head, causal)
    moved, _ = ops.head_forward(a, head._replace(b_k=head.b_k + 3), causal)
    assert_close(moved, y)
    grads = ops.head_backward(dy, saved)[1]
    assert_zero(grads.b_k)
    assert_alive(grads.b_q)


@pytest.mark.parametrize("causal", [True, False])
def test_with_keys_and_queries_exchanged_it_is_the_bias_of_queries_that_vanishes(causal: bool) -> None:
    rng = np.random.default_rng(0)
    a, dy, head = rng.normal(size=(5, 4)), rng.normal(size=(5, 3)), random_head(rng, 4, 2, 3)
    q, k, v = a @ head.w_q + head.b_q, a @ head.w_k + head.b_k, a @ head.w_v + head.b_v
    y, saved = ops.attention_forward(k, q, v, causal)  # ρ = softmax(k qᵗ)
    assert_close(ops.attention_forward(k, q + np.array([2.0, -3.0]), v, causal)[0], y)
    dk, dq, _ = ops.attention_backward(dy, saved)
    np.testing.assert_allclose(dq.sum(axis=0), 0, atol=1e-14)  # ∂b_q
    assert_alive(dk.sum(axis=0))  # ∂b_k
    assert_alive(dq)


@both
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_added_to_the_bias_of_values_is_added_to_the_output(asarray: Any, causal: bool) -> None:
    rng = np.random.default_rng(0)
    a, delta = asarray(rng.normal(size=(2, 5, 4))), asarray(rng.normal(size=3))
    head = Head(*map(asarray, random_head(rng, 4, 2, 3)))
    y, _ = ops.head_forward(a, head, causal)
    moved, _ = ops.head_forward(a, head._replace(b_v=head.b_v + delta), causal)
    assert_close(moved, y + delta)


# --- several heads, cached keys ------------------------------------------------------------------------------------


@both
def test_each_head_gets_its_own_columns_and_their_error_signals_add_up(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    a, widths = rng.normal(size=(2, 5, 7)), [(3, 2), (2, 4), (1, 3)]  # (d_ρ, d_h): Σ d_h = 9 ≠ d = 7
    heads = [random_head(rng, 7, *width) for width in widths]
    w3, d4 = rng.normal(size=(9, 7)), rng.normal(size=(2, 5, 7))
    dy = d4 @ w3.T  # the separate output projection is (Σ d_h) × d
    y, saved = ops.heads_forward(asarray(a), [Head(*map(asarray, head)) for head in heads])
    da, grads = ops.heads_backward(asarray(dy), saved)

    leaves = [torch.from_numpy(x).requires_grad_() for x in (a, *(x for head in heads for x in head))]
    parts = []
    for h in range(3):
        w_q, b_q, w_k, b_k, w_v, b_v = leaves[1 + 6 * h : 7 + 6 * h]
        q, k, v = leaves[0] @ w_q + b_q, leaves[0] @ w_k + b_k, leaves[0] @ w_v + b_v
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert_close(y, torch.cat(parts, -1).detach())  # eq 34
    columns = [(0, 2), (2, 6), (6, 9)]
    by_head = [
        torch.autograd.grad(part, [leaves[0], *leaves[1 + 6 * h : 7 + 6 * h]], torch.from_numpy(dy[..., i:j]))
        for h, (part, (i, j)) in enumerate(zip(parts, columns, strict=True))
    ]
    assert_close(da, sum(one[0] for one in by_head))  # eq 35
    for got, expected in zip(grads, by_head, strict=True):
        for name, value, oracle in zip(Head._fields, got, expected[1:], strict=True):
            np.testing.assert_allclose(to_numpy(value), oracle.numpy(), rtol=1e-10, atol=1e-13, err_msg=name)


def random_projections(rng: np.random.Generator, d: tuple[int, int, int], out: tuple[int, int]) -> list[np.ndarray]:
    """w_q, b_q, w_k, b_k, w_v, b_v of inputs of the widths `d`."""
    widths = zip(d, (out[0], out[0], out[1]), strict=True)
    return [x for n, m in widths for x in (rng.normal(size=(n, m)), rng.normal(size=m))]


@both
@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention_of_one_input_is_the_heads_of_table_1(asarray: Any, causal: bool) -> None:
    rng = np.random.default_rng(0)
    a, dy = asarray(rng.normal(size=(2, 5, 7))), asarray(rng.normal(size=(2, 5, 12)))
    given = [asarray(x) for x in random_projections(rng, (7, 7, 7), (6, 12))]
    y, saved = ops.multi_head_forward(a, a, a, *given, 3, causal)
    dquery, dkey, dvalue, *grads = ops.multi_head_backward(dy, saved)
    columns = [[slice(h * n, h * n + n) for n in (2, 2, 2, 2, 4, 4)] for h in range(3)]
    heads = [Head(*(x[..., cut] for x, cut in zip(given, cuts, strict=True))) for cuts in columns]
    by_head, saved_heads = ops.heads_forward(a, heads, causal)
    assert_close(y, by_head)
    da, head_grads = ops.heads_backward(dy, saved_heads)
    assert_close(dquery + dkey + dvalue, da)  # eq 33, 35
    for cuts, expected in zip(columns, head_grads, strict=True):
        for got, cut, one in zip(grads, cuts, expected, strict=True):
            np.testing.assert_allclose(to_numpy(got[..., cut]), to_numpy(one), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention_is_that_of_pytorch(causal: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 3, kdim=5, vdim=4, batch_first=True, dtype=torch.float64)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = [torch.randn(2, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((4, 6), (7, 5), (7, 4))]
    mask = ~torch.ones(4, 7, dtype=torch.bool).tril(3) if causal else None
    expected, _ = layer(*x, attn_mask=mask, need_weights=False)
    dout = torch.randn_like(expected)
    expected.backward(dout)

    weights = [w.detach().numpy().T for w in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)]
    biases = np.split(layer.in_proj_bias.detach().numpy(), 3)
    given = [one for pair in zip(weights, biases, strict=True) for one in pair]
    mixed, saved = ops.multi_head_forward(*(one.detach().numpy() for one in x), *given, 3, causal)
    w_o, b_o = layer.out_proj.weight.detach().numpy().T, layer.out_proj.bias.detach().numpy()
    y, s_out = ops.linear_forward(mixed, w_o, b_o)
    assert_close(y, expected.detach())
    grads = ops.multi_head_backward(ops.linear_backward(dout.numpy(), s_out)[0], saved)
    for got, one in zip(grads[:3], x, strict=True):
        assert_close(got, one.grad)
    for got, one in zip(grads[3::2], (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight), strict=True):
        assert_close(got, one.grad.T)
    np.testing.assert_allclose(np.concatenate(grads[4::2]), layer.in_proj_bias.grad.numpy(), rtol=1e-10, atol=1e-13)


@both
def test_cross_attention_does_not_depend_on_the_order_of_the_keys(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    query, key, value, dy = (rng.normal(size=s) for s in ((2, 3, 4), (2, 6, 5), (2, 6, 7), (2, 3, 8)))
    given, order = random_projections(rng, (4, 5, 7), (6, 8)), rng.permutation(6)

    def run(key: np.ndarray, value: np.ndarray) -> tuple[Any, ...]:
        y, saved = ops.multi_head_forward(*map(asarray, (query, key, value, *given)), 2, causal=False)
        return y, *ops.multi_head_backward(asarray(dy), saved)

    plain, permuted = run(key, value), run(key[:, order], value[:, order])
    for i, (one, other) in enumerate(zip(plain, permuted, strict=True)):
        assert_close(other, one[:, order] if i in (2, 3) else one)
    assert_close(plain[-1], dy.sum(axis=(0, 1)))  # eq 24: over the queries


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": (7, 4)}, "causal mask needs at least as many keys as queries, got 5 and 7; causal=False"),
        ({"value": (6, 7)}, "of the same tokens, got 5 and 6"),
        ({"w_k": (5, 8)}, "same width, got 6 and 8"),
        ({"w_v": (7, 9)}, "columns of w_v must be a multiple of n_head=2, got 9"),
    ],
)
def test_multi_head_attention_refuses_shapes_that_cannot_be_meant(changed: Any, message: str) -> None:
    shapes = {"query": (3, 4), "key": (5, 5), "value": (5, 7), "w_q": (4, 6), "w_k": (5, 6), "w_v": (7, 8), **changed}
    query, key, value, w_q, w_k, w_v = (np.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        ops.multi_head_forward(query, key, value, w_q, None, w_k, None, w_v, None, 2)


@both
def test_a_row_computed_from_cached_keys_and_values_is_the_row_of_the_whole(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(6, d)) for d in (5, 5, 3))
    whole, _ = ops.attention_forward(*map(asarray, (q, k, v)))
    for t in range(6):
        row, _ = ops.attention_forward(*map(asarray, (q[t : t + 1], k[: t + 1], v[: t + 1])))
        weights = np.array([math.exp(q[t] @ k[s] / math.sqrt(5)) for s in range(t + 1)])
        assert_close(row[0], sum(w * v[s] for s, w in enumerate(weights)) / weights.sum())
        assert_close(row[0], whole[t])


@few
@given(cuts=st.lists(st.integers(1, 3), min_size=1, max_size=4), d_rho=sizes, d_h=sizes, seed=seeds)
def test_chunks_of_queries_behind_their_keys_are_the_rows_of_the_whole(
    cuts: list[int], d_rho: int, d_h: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = sum(cuts)
    q, k, v, dy = (rng.normal(size=(2, n, d)) for d in (d_rho, d_rho, d_h, d_h))
    whole, saved = ops.attention_forward(q, k, v)
    dq, dk, dv = ops.attention_backward(dy, saved)
    dk_sum, dv_sum, first = np.zeros_like(k), np.zeros_like(v), 0
    for cut in cuts:
        last = first + cut
        y, saved = ops.attention_forward(q[:, first:last], k[:, :last], v[:, :last])  # n_q < n_k
        assert_close(y, whole[:, first:last])
        dq_part, dk_part, dv_part = ops.attention_backward(dy[:, first:last], saved)
        np.testing.assert_allclose(dq_part, dq[:, first:last], atol=1e-12)
        dk_sum[:, :last] += dk_part
        dv_sum[:, :last] += dv_part
        first = last
    np.testing.assert_allclose(dk_sum, dk, atol=1e-12)
    assert_close(dv_sum, dv)


# --- layer norm, LoRA, embedding, loss -----------------------------------------------------------------------------


@both
def test_layer_norm_forgets_scale_and_shift_and_its_error_signal_sums_to_zero(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    x, weight, bias, dy = (asarray(rng.normal(size=shape)) for shape in ((2, 5, 7), (7,), (7,), (2, 5, 7)))
    y, saved = ops.layer_norm_forward(x, weight, bias, eps=1e-14)
    assert_close(ops.layer_norm_forward(5 * x + 3, weight, bias, eps=1e-14)[0], y)
    dx, _, _ = ops.layer_norm_backward(dy, saved)
    assert_alive(dx)
    np.testing.assert_allclose(to_numpy(dx.sum(axis=-1)), 0, atol=1e-13)
    np.testing.assert_allclose(to_numpy((dx * x).sum(axis=-1)), 0, atol=1e-12)  # scaling x changes nothing either


def test_layer_norm_is_batch_norm_of_the_transpose_in_both_passes() -> None:
    rng = np.random.default_rng(0)
    a, dy = rng.normal(2, 3, size=(5, 7)), rng.normal(size=(5, 7))

    def batch_norm_transposed(x: torch.Tensor) -> torch.Tensor:  # eq 39
        return F.batch_norm(x.T, None, None, training=True, eps=1e-5).T

    y, saved = ops.layer_norm_forward(a, np.ones(7), np.zeros(7), eps=1e-5)
    assert_close(y, batch_norm_transposed(torch.from_numpy(a)))
    assert_close(ops.layer_norm_backward(dy, saved)[0], autograd(batch_norm_transposed, [a], dy)[0])


@both
def test_the_transpose_takes_batch_norm_to_layer_norm_in_both_passes(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    x, dy, weight = (asarray(rng.normal(2, 3, size=shape)) for shape in ((5, 7), (5, 7), (7,)))
    one, zero = asarray(np.ones(5)), asarray(np.zeros(5))
    y, saved = ops.layer_norm_forward(x, weight, 0 * weight, 1e-2)
    transposed, s_batch = ops.batch_norm_forward(x.T, one, zero, 1e-2)
    assert_close(transposed.T * weight, y)  # eq 39; the weight is one per feature in both
    assert_close(ops.batch_norm_backward((dy * weight).T, s_batch)[0].T, ops.layer_norm_backward(dy, saved)[0])


@both
def test_batch_norm_mixes_rows_and_its_error_signal_sums_to_zero_over_the_batch(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    x, weight, bias, dy = (asarray(rng.normal(size=shape)) for shape in ((2, 5, 7), (7,), (7,), (2, 5, 7)))
    y, saved = ops.batch_norm_forward(x, weight, bias, eps=1e-14)
    assert_close(ops.batch_norm_forward(5 * x + 3, weight, bias, eps=1e-14)[0], y)
    dx, _, _ = ops.batch_norm_backward(dy, saved)
    assert_alive(dx)
    np.testing.assert_allclose(to_numpy(dx.reshape(10, 7).sum(axis=0)), 0, atol=1e-13)
    dy[0, 0] += 1
    assert abs(to_numpy(ops.batch_norm_backward(dy, saved)[0] - dx)[1]).min() > 0  # another row's error signal
    y, saved = ops.batch_norm_forward(x[:1, :1], weight, bias)
    assert_close(y[0, 0], bias)
    assert_zero(ops.batch_norm_backward(dy[:1, :1], saved)[0])


@both
def test_a_lora_layer_can_be_merged_into_its_frozen_layer(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    x, w, b, down, up, dy = (rng.normal(size=s) for s in ((2, 3, 7), (7, 5), (5,), (7, 2), (2, 5), (2, 3, 5)))
    y, saved = ops.lora_linear_forward(*map(asarray, (x, w, b, down, up)), 0.3)
    merged = torch.from_numpy(w + 0.3 * (down @ up))
    assert_close(y, torch.from_numpy(x) @ merged + torch.from_numpy(b))
    assert_close(ops.lora_linear_backward(asarray(dy), saved)[0], autograd(lambda x: x @ merged, [x], dy)[0])
    assert lora_count([w.shape], r=2) == down.size + up.size
    beside, _ = ops.lora_forward(*map(asarray, (np.eye(7), down, up)), 0.3)
    assert np.linalg.matrix_rank(to_numpy(beside)) == 2


@both
def test_looking_up_is_the_one_hot_product_and_repeated_tokens_accumulate(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    ids, table, dy = np.array([[3, 1, 3], [3, 0, 1]]), rng.normal(size=(5, 4)), rng.normal(size=(2, 3, 4))
    one_hot = np.zeros((2, 3, 5))
    for b, t in np.ndindex(2, 3):
        one_hot[b, t, ids[b, t]] = 1
    y, saved = ops.embedding_forward(asarray(ids), asarray(table))
    assert (to_numpy(y) == one_hot @ table).all()  # eq 2
    grad = ops.embedding_backward(asarray(dy), saved)
    assert_close(grad, np.einsum("btv,btc->vc", one_hot, dy))  # eq 3
    assert_close(grad[3], dy[0, 0] + dy[0, 2] + dy[1, 0])
    assert_zero(grad[[2, 4]])
    d_one_hot = ops.embedding_input_gradient(asarray(dy), asarray(table))
    assert_close(d_one_hot, autograd(lambda x: x @ torch.from_numpy(table), [one_hot], dy)[0])  # Δ_0


@both
def test_rows_of_the_loss_gradient_sum_to_zero_and_a_masked_token_has_none(asarray: Any) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(0, 3, size=(2, 4, 7)), rng.integers(0, 7, size=(2, 4))
    masked = targets.copy()
    masked[[0, 1], [2, 0]] = -100
    rows = {}
    for name, target in (("all", targets), ("masked", masked)):
        _, saved = ops.cross_entropy_forward(asarray(logits), asarray(target), 1)
        rows[name] = to_numpy(ops.cross_entropy_backward(1.0, saved))
        assert_alive(rows["all"])
        np.testing.assert_allclose(rows[name].sum(axis=-1), 0, atol=1e-15)
    hidden = masked == -100
    assert_zero(rows["masked"][hidden])
    assert (rows["masked"][~hidden] == rows["all"][~hidden]).all()
    y_gt = np.eye(7)[targets]
    assert_close(rows["all"], torch.from_numpy(logits).softmax(-1).numpy() - y_gt)


# --- the network ---------------------------------------------------------------------------------------------------

CONFIG = onfoot.GPT2Config(
    13, 9, 10, 2, 3, n_inner=17, head_dim=3, qk_head_dim=2, layer_norm_epsilon=1e-3
)  # 3 × 3 ≠ 10
TOKENS = np.array([[3, 12, 3, 0, 7, 3, 1], [5, 5, 11, 2, 0, 12, 3]])
KEYS, VALUES = slice(6, 12), slice(12, 21)  # of c_attn's columns: q | k | v


def random_model(engine: str = "numpy", dtype: str = "float64", **changes: Any) -> Model:
    config = replace(CONFIG, **changes)
    return Model(config, oracles.scrambled(onfoot.create(config).params, 0, scale=0.5), dtype, engine)


def changed(model: Model, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Model:
    """The model with one parameter changed."""
    params = {**model.params, name: change(np.array(to_numpy(model.params[name])))}
    return Model(model.config, params, model.dtype, model.engine)


def assert_same_gradients(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(got) == set(expected)
    for name in expected:
        oracles.assert_close(to_numpy(got[name]), to_numpy(expected[name]), 1e-12, name)


@engines
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
def test_the_error_signal_climbs_the_chain_of_table_2(engine: str, activation: str) -> None:
    model = random_model(engine, activation_function=activation, tie_word_embeddings=False, lm_head_bias=True)
    trace = model.trace(TOKENS, divisor=1)
    params = {name: torch.from_numpy(to_numpy(value)) for name, value in model.params.items()}

    def norm(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.layer_norm(x, (10,), params[f"{name}.weight"], params[f"{name}.bias"], 1e-3)

    def linear(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: F.linear(x, params[f"{name}.weight"].T, params[f"{name}.bias"])

    def heads(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def function(x: torch.Tensor) -> torch.Tensor:
            split = (z.unflatten(-1, (3, -1)).transpose(1, 2) for z in linear(name)(x).split([6, 6, 9], -1))
            return F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)

        return function

    def up(layer: Callable[[torch.Tensor], torch.Tensor], x: Any, dy: Any) -> np.ndarray:
        return autograd(layer, [to_numpy(x)], to_numpy(dy))[0]

    g = {"gelu_new": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}[activation]
    targets = torch.tensor(np.concatenate([TOKENS[:, 1:], np.full((2, 1), -100)], axis=1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")

    assert_close(trace["Δ_12"], up(loss, trace["a_12"], np.array(1.0)))
    assert_close(trace["Δ_11"], up(lambda x: x @ params["lm_head.weight"].T, trace["a_11"], trace["Δ_12"]))
    above = up(norm("transformer.ln_f"), trace["a_10", 1], trace["Δ_11"])
    for b in (1, 0):
        a, d, name = trace.blocks[b].a, trace.blocks[b].delta, f"transformer.h.{b}"
        assert_close(d[10], above)
        assert_close(d[9], d[10])
        assert_close(d[8], up(linear(f"{name}.mlp.c_proj"), a[8], d[9]))
        assert_close(d[7], up(g, a[7], d[8]))
        assert_close(d[6], up(linear(f"{name}.mlp.c_fc"), a[6], d[7]))
        assert_close(d[5], to_numpy(d[10]) + up(norm(f"{name}.ln_2"), a[5], d[6]))  # both ways of the skip
        assert_close(d[4], d[5])
        assert_close(d[3], up(linear(f"{name}.attn.c_proj"), a[3], d[4]))
        assert_close(d[2], up(heads(f"{name}.attn.c_attn"), a[2], d[3]))
        assert_close(d[1], to_numpy(d[5]) + up(norm(f"{name}.ln_1"), a[1], d[2]))
        above = to_numpy(d[1])


def block_weights(model: Model, b: int) -> list[Head]:
    """c_attn taken apart into the heads of Table 1."""
    weight, bias = (to_numpy(model.params[f"transformer.h.{b}.attn.c_attn.{x}"]) for x in ("weight", "bias"))
    q, k, v = ([start + np.arange(h * d, h * d + d) for h in range(3)] for start, d in ((0, 2), (6, 2), (12, 3)))
    return [Head(*(x for i in (q[h], k[h], v[h]) for x in (weight[:, i], bias[i]))) for h in range(3)]


@pytest.mark.parametrize("b", [0, 1])
def test_all_heads_in_one_product_are_the_heads_of_table_1_side_by_side(b: int) -> None:
    model = random_model()
    trace = model.trace(TOKENS)
    y, saved = ops.heads_forward(trace["a_2", b], block_weights(model, b))
    assert_close(trace["a_3", b], y)
    d2, grads = ops.heads_backward(trace["Δ_3", b], saved)
    assert_close(trace["Δ_2", b], d2)
    for part in ("q", "k", "v"):
        columns = {"q": slice(0, 6), "k": KEYS, "v": VALUES}[part]
        got = trace.grads[f"transformer.h.{b}.attn.c_attn.weight"][:, columns]
        assert_close(got, np.concatenate([getattr(head, f"w_{part}") for head in grads], axis=1))


@engines
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_of_scores_is_exactly_lower_triangular_and_its_first_row_exactly_zero(
    engine: str, dtype: str
) -> None:
    trace = random_model(engine, dtype).trace(TOKENS)
    for block in trace.blocks:
        d_causal = to_numpy(block.delta_causal)  # (B, H, T, T)
        assert_zero(np.triu(d_causal, 1))
        assert_zero(d_causal[:, :, 0])  # ρ_11 = 1, whatever the score
        assert_alive(np.abs(d_causal[:, :, 1:-1]).max(axis=-1))
        size = np.abs(d_causal).max()
        np.testing.assert_allclose(d_causal.sum(axis=-1), 0, atol=size * 100 * np.finfo(dtype).eps)  # eq 26


def test_the_gradient_of_scores_is_autograds() -> None:
    block = random_model().trace(TOKENS).blocks[1]
    d3 = block.delta[3].reshape(2, 7, 3, 3).swapaxes(1, 2)
    future = torch.ones(7, 7).triu(1).bool()

    def mix(scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(future, -math.inf).softmax(-1) @ torch.from_numpy(block.v)

    scores = np.einsum("bhid,bhjd->bhij", block.q, block.k) / math.sqrt(2)
    assert_close(block.delta_causal, autograd(mix, [scores], d3)[0])


@engines
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_last_token_without_target_receives_exactly_nothing(engine: str, dtype: str) -> None:
    trace = random_model(engine, dtype).trace(TOKENS)
    for block in trace.blocks:
        for i in range(1, 11):
            assert_zero(block.delta[i][:, -1])
        assert_alive(block.delta[1][:, :-1])


@engines
def test_the_bias_of_keys_has_no_effect_on_logits_and_a_gradient_of_exactly_zero(engine: str) -> None:
    model = random_model(engine, "float32")
    _, grads = model.loss_and_grads(TOKENS)
    for b in (0, 1):
        bias = grads[f"transformer.h.{b}.attn.c_attn.bias"]
        assert_zero(bias[KEYS])
        assert_alive(bias[:6]), assert_alive(bias[VALUES])

    def shift(columns: slice) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: x + 2.0 * (np.arange(21) >= columns.start) * (np.arange(21) < columns.stop)

    exact = random_model(engine)
    logits = to_numpy(exact.logits(TOKENS))
    moved = to_numpy(changed(exact, "transformer.h.0.attn.c_attn.bias", shift(KEYS)).logits(TOKENS))
    assert_close(moved, logits)
    other = to_numpy(changed(exact, "transformer.h.0.attn.c_attn.bias", shift(slice(0, 6))).logits(TOKENS))
    assert not np.allclose(other, logits, rtol=1e-3)  # the queries' biases do act


@engines
@pytest.mark.parametrize("causal", [True, False])
def test_the_gradient_of_the_values_biases_follows_from_that_of_the_projections_bias(engine: str, causal: bool) -> None:
    model = random_model(engine, causal=causal)
    _, grads = model.loss_and_grads(TOKENS)
    for b in (0, 1):
        name = f"transformer.h.{b}.attn"
        expected = to_numpy(grads[f"{name}.c_proj.bias"]) @ to_numpy(model.params[f"{name}.c_proj.weight"]).T
        assert_close(grads[f"{name}.c_attn.bias"][VALUES], expected)  # ∂b_v = ∂b_3 w_3ᵗ


DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")


def biases_under(dropout: str | None) -> tuple[Model, dict[str, np.ndarray]]:
    """A model with one kind of dropout, and the gradients of a step with it."""
    model = random_model(**{name: 0.4 if name == dropout else 0.0 for name in DROPOUTS})
    return model, model.loss_and_grads(TOKENS, dropout_seed=3)[1]


@pytest.mark.parametrize("dropout", [None, *DROPOUTS])
def test_the_biases_of_the_two_projections_have_gradients_that_sum_to_zero_without_residual_dropout(
    dropout: str | None,
) -> None:
    _, grads = biases_under(dropout)
    for b in (0, 1):
        for layer in ("attn.c_proj", "mlp.c_proj"):  # ∂b_3, ∂b_8
            bias = grads[f"transformer.h.{b}.{layer}.bias"]
            share = abs(bias.sum()) / np.abs(bias).sum()
            assert share > 1e-3 if dropout == "resid_pdrop" else share < 1e-13, (layer, share)


@pytest.mark.parametrize("dropout", DROPOUTS)
def test_the_gradient_of_the_values_biases_does_not_follow_with_attention_dropout(dropout: str) -> None:
    model, grads = biases_under(dropout)
    for b in (0, 1):
        name = f"transformer.h.{b}.attn"
        expected = grads[f"{name}.c_proj.bias"] @ to_numpy(model.params[f"{name}.c_proj.weight"]).T
        error = oracles.relative_error(grads[f"{name}.c_attn.bias"][VALUES], expected)
        assert error > 1e-2 if dropout == "attn_pdrop" else error < 1e-12, error


@engines
def test_positions_beyond_the_sequence_receive_exactly_nothing_the_others_the_whole_batch(engine: str) -> None:
    model = random_model(engine)
    trace = model.trace(TOKENS)
    grad = to_numpy(trace.grads["transformer.wpe.weight"])
    assert_zero(grad[7:])
    for t in range(7):
        assert_close(grad[t], to_numpy(trace["Δ_1", 0][0, t]) + to_numpy(trace["Δ_1", 0][1, t]))
    assert_alive(grad[:6])


def slope(loss: Callable[[float], float], h: float = 1e-3) -> float:
    """The derivative at 0 by a four-point difference."""
    return (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)


@pytest.mark.parametrize(("t", "other"), [(0, 5), (3, 12), (5, 3)])
def test_the_gradient_of_the_tokens_says_what_a_little_of_another_token_would_do(t: int, other: int) -> None:
    model = random_model(tie_word_embeddings=False)
    tokens = TOKENS[:1]
    table, own = model.params["transformer.wte.weight"], int(tokens[0, t])
    d0 = model.trace(tokens, input_gradient=True)["Δ_0"]
    assert d0.shape == (1, 7, 13)

    def loss(direction: np.ndarray, step: float) -> float:
        """With so much added to the one-hot row of token t; the position's row carries it."""
        moved = np.zeros((9, 10))
        moved[t] = step * direction
        return changed(model, "transformer.wpe.weight", lambda x: x + moved).loss(tokens)

    assert d0[0, t, other] == pytest.approx(slope(lambda h: loss(table[other], h)), rel=1e-8)
    assert d0[0, t, own] == pytest.approx(slope(lambda h: loss(table[own], h)), rel=1e-8)  # gradient × input
    swap = slope(lambda h: loss(table[other] - table[own], h))
    assert d0[0, t, other] - d0[0, t, own] == pytest.approx(swap, rel=1e-8)


@engines
def test_the_gradient_of_a_batch_is_the_sum_over_its_sequences(engine: str) -> None:
    model = random_model(engine)
    loss, grads = model.loss_and_grads(TOKENS, divisor=1)
    parts = [model.loss_and_grads(TOKENS[i : i + 1], divisor=1) for i in (0, 1)]
    assert loss == pytest.approx(sum(part[0] for part in parts), rel=1e-13)
    assert_same_gradients(grads, {name: parts[0][1][name] + parts[1][1][name] for name in grads})


def test_a_masked_target_takes_its_term_out_of_the_loss_and_of_the_gradient() -> None:
    model = random_model()
    targets = np.concatenate([TOKENS[:, 1:], np.full((2, 1), -100)], axis=1)
    only, without = np.full_like(targets, -100), targets.copy()
    only[0, 3], without[0, 3] = targets[0, 3], -100
    (whole, grads), (one, one_grads), (rest, rest_grads) = (
        model.loss_and_grads(TOKENS, t, divisor=1) for t in (targets, only, without)
    )
    assert whole == pytest.approx(one + rest, rel=1e-13)
    assert_same_gradients(grads, {name: one_grads[name] + rest_grads[name] for name in grads})
    assert_zero(model.trace(TOKENS, without)["Δ_12"][0, 3])


def check_packing(model: Model, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    examples = [(rng.integers(0, 13, (1, n)), rng.integers(0, 13, (1, n))) for n in lengths]
    for _, targets in examples[1:]:
        targets[rng.random(targets.shape) < 0.3] = -100
    tokens, targets = (np.concatenate([example[i] for example in examples], axis=1) for i in (0, 1))
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    divisor = int((targets != -100).sum())
    loss, grads = model.loss_and_grads(tokens, targets, segments=segments, divisor=divisor)
    alone = [model.loss_and_grads(*example, divisor=divisor) for example in examples]
    assert loss == pytest.approx(sum(one for one, _ in alone), rel=1e-12)
    assert_same_gradients(grads, {name: sum(part[name] for _, part in alone) for name in grads})


@few
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) <= 9),
    st.sampled_from(["numpy", "torch"]),
    seeds,
)
def test_packed_examples_give_the_sum_of_what_they_give_alone(lengths: list[int], engine: str, seed: int) -> None:
    check_packing(random_model(engine), lengths, seed)


def test_packed_examples_need_a_causal_mask() -> None:
    with pytest.raises(ValueError, match="segments need causal=True"):
        check_packing(random_model(causal=False), [3, 4], 0)


def test_without_targets_no_example_predicts_the_beginning_of_the_next() -> None:
    model = random_model()
    segments = np.array([[0, 0, 0, 1, 1, 2, 2]] * len(TOKENS))
    targets = np.concatenate([TOKENS[:, 1:], np.full((len(TOKENS), 1), -100)], axis=1)
    targets[:, [2, 4]] = -100
    assert model.loss(TOKENS, segments=segments) == model.loss(TOKENS, targets, segments=segments)


def test_packed_examples_may_be_cut_differently_in_each_row_of_a_batch() -> None:
    model = random_model()
    segments = np.array([[0, 0, 0, 1, 1, 1, 1], [2, 2, 5, 5, 5, 5, 9]])
    targets = np.array([[12, 3, -100, 7, 3, 1, -100], [5, -100, 2, 0, 12, -100, -100]])
    loss, grads = model.loss_and_grads(TOKENS, targets, segments=segments, divisor=9)
    cuts = [(0, 0, 3), (0, 3, 7), (1, 0, 2), (1, 2, 6)]  # the last example is one token without target
    alone = [model.loss_and_grads(TOKENS[[r], i:j], targets[[r], i:j], divisor=9) for r, i, j in cuts]
    assert loss == pytest.approx(sum(one for one, _ in alone), rel=1e-12)
    assert_same_gradients(grads, {name: sum(part[name] for _, part in alone) for name in grads})
    trace = model.trace(TOKENS, targets, segments=segments)
    assert_zero(trace["ρ", 1][0, :, 3:, :3])
    assert_zero(trace["Δ_1", 0][1, 6])


def test_a_network_without_positions_and_mask_is_permutation_equivariant() -> None:
    order = np.array([4, 0, 6, 1, 5, 3, 2])
    for causal, with_positions in ((False, False), (True, False), (False, True)):
        model = random_model(causal=causal)
        if not with_positions:
            model = changed(model, "transformer.wpe.weight", np.zeros_like)
        same = np.allclose(model.logits(TOKENS[:, order]), model.logits(TOKENS)[:, order], rtol=0, atol=1e-12)
        assert same == (not causal and not with_positions)


def cache_bytes(model: Model, capacity: int) -> tuple[int, int]:
    """Of a cache for so many tokens, with one in it: the bytes of its arrays, and of all that was allocated for it."""
    tracemalloc.start()
    cache = KVCache(capacity)
    step(model, np.zeros((1, 1), int), np.zeros(1, int), cache)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return 4 * cache.n_numbers, allocated


def test_cached_keys_and_values_grow_linearly_and_fill_72_mib_for_gpt2() -> None:
    small = onfoot.preset("gpt2", vocab_size=3)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes(small).items()}
    model = Model(small, zeros, "float32", "numpy")
    for capacity, mib in ((256, 18), (512, 36), (1024, 72)):
        arrays, allocated = cache_bytes(model, capacity)
        assert arrays == mib * 2**20
        assert allocated == pytest.approx(arrays, rel=0.01)  # and nothing else is kept
    assert arrays == 4 * 18_874_368
