"""What the paper takes from the one before it: the recursion, the softmax, three products, batch norm, six steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import onfoot
import oracles
from onfoot.models.model import Model
from onfoot.ops import batch_norm_backward, batch_norm_forward, layer_norm_backward, layer_norm_forward
from onfoot.ops.attention import softmax, softmax_backward
from oracles import assert_close, autograd

sizes, seeds = st.integers(1, 6), st.integers(0, 2**32 - 1)


def test_the_change_of_the_loss_is_the_same_number_at_every_layer() -> None:
    """Δ_i · da_i of every residual step of the network, for one change of the tokens' embeddings."""
    config = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=6, vocab_size=13, tie_word_embeddings=False)
    params = oracles.scrambled(dict(onfoot.create(config, dtype="float64", engine="numpy").params), 0)
    tokens, h, table = np.array([[3, 1, 4, 1, 5]]), 1e-5, "transformer.wpe.weight"
    direction = np.random.default_rng(0).normal(size=params[table].shape)
    trace = Model(config, params, "float64", "numpy").trace(tokens)
    models = [Model(config, params | {table: params[table] + s * direction}, "float64", "numpy") for s in (h, -h)]
    slope = (models[0].loss(tokens) - models[1].loss(tokens)) / (2 * h)
    up, down = (model.trace(tokens) for model in models)
    changes = [
        float((trace[f"Δ_{i}", block] * (up[f"a_{i}", block] - down[f"a_{i}", block])).sum() / (2 * h))
        for block in (0, 1)
        for i in (1, 5, 10)  # at these, all that changes passes through one array
    ]
    assert changes == pytest.approx([slope] * 6, rel=1e-7)


@settings(max_examples=25)
@given(n=sizes, m=sizes, seed=seeds)
def test_the_differential_of_the_softmax_is_its_jacobian_times_the_change(n: int, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    s, ds = rng.normal(size=(n, m)), rng.normal(size=(n, m))
    rho = softmax(s)
    _, expected = torch.autograd.functional.jvp(lambda x: x.softmax(-1), torch.from_numpy(s), torch.from_numpy(ds))
    got = rho * (ds - (rho * ds).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-13)
    np.testing.assert_allclose(softmax_backward(ds, rho), got, atol=1e-13)  # the Jacobian is symmetric


@settings(max_examples=25)
@given(n=sizes, m=sizes, r=sizes, seed=seeds)
def test_factors_change_sides_of_a_frobenius_product(n: int, m: int, r: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(size=(n, m)), rng.normal(size=(n, r)), rng.normal(size=(r, m))
    by_index = sum(a[j, k] * b[j, i] * c[i, k] for j in range(n) for k in range(m) for i in range(r))
    products = [np.einsum("jk,jk", a, b @ c), np.einsum("lk,lk", b.T @ a, c), np.einsum("jl,jl", a @ c.T, b)]
    np.testing.assert_allclose(products, by_index, atol=1e-12)
    d, e = rng.normal(size=(2, n, m))
    by_index = sum(a[j, k] * d[j, k] * e[j, k] for j in range(n) for k in range(m))
    np.testing.assert_allclose([np.vdot(a, d * e), np.vdot(a * d, e)], by_index, atol=1e-12)
    rows = [a[j] @ d[j] for j in range(n)]  # ⊖
    assert math.isclose(sum(rows), np.vdot(a, d), rel_tol=1e-9, abs_tol=1e-9)


def batch_norm_error(delta: np.ndarray, normed: np.ndarray, sigma: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The earlier paper's (41), for n samples in the rows."""
    n = len(delta)
    g = delta @ np.diag(w)
    return (n * g - g.sum(axis=0) - normed * (normed * g).sum(axis=0)) @ np.diag(1 / (n * sigma))


def test_batch_norms_backward_as_it_is_printed_is_that_of_autograd() -> None:
    rng = np.random.default_rng(0)
    x, w, b, delta = rng.normal(2, 3, (5, 7)), rng.normal(size=7), rng.normal(size=7), rng.normal(size=(5, 7))
    sigma = x.std(axis=0)
    normed = (x - x.mean(axis=0)) / sigma

    def batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, w, b, training=True, eps=1e-30)

    assert_close(normed * w + b, batch_norm(*map(torch.from_numpy, (x, w, b))).numpy(), 1e-13)  # (39)
    dx, dw, db = autograd(batch_norm, [x, w, b], delta)
    assert_close(batch_norm_error(delta, normed, sigma, w), dx, 1e-12)  # (41)
    assert_close(np.diag(normed.T @ delta), dw, 1e-12)  # (42)
    assert_close(delta.sum(axis=0), db, 1e-12)  # (43)
    y, saved = batch_norm_forward(x, w, b, eps=0.0)
    assert_close(y, normed * w + b, 1e-13)
    for got, expected in zip(batch_norm_backward(delta, saved), (dx, dw, db), strict=True):
        assert_close(got, expected, 1e-12)


def six_steps(x: np.ndarray, delta: np.ndarray, w: np.ndarray, without: int = 0) -> np.ndarray:
    """The page's steps in their order; one of them may be left out."""
    t, d = x.shape
    sigma = x.std(axis=1)
    normed = (x - x.mean(axis=1, keepdims=True)) / sigma[:, None]
    wd, a = np.diag(w) @ delta.T, normed.T  # 2: (d, T)
    axis = 1 if without == 3 else 0  # 3: down the rows of the transpose are features
    n = t if without == 6 else d  # 6
    bracket = n * wd - wd.sum(axis, keepdims=True) - a * (a * wd).sum(axis, keepdims=True)
    return np.diag(1 / (n * sigma)) @ bracket.T  # 4, 5: transposed, and the division from the left


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (6, 6)], ids=str)
def test_six_steps_turn_batch_norms_error_signal_into_layer_norms(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, delta, w, b = (
        rng.normal(2, 3, shape),
        rng.normal(size=shape),
        rng.normal(size=shape[1]),
        rng.normal(size=shape[1]),
    )
    got = six_steps(x, delta, w)
    expected = autograd(lambda x: F.layer_norm(x, shape[1:], torch.tensor(w), torch.tensor(b), eps=0), [x], delta)[0]
    assert_close(got, expected, 1e-12)
    assert_close(layer_norm_backward(delta, layer_norm_forward(x, w, b, eps=0)[1])[0], got, 1e-12)
    sigma = x.std(axis=1)
    normed = (x - x.mean(axis=1, keepdims=True)) / sigma[:, None]
    transposed = batch_norm_error((delta * w).T, normed.T, sigma, np.ones(len(x))).T  # 1 to 6 at once
    assert_close(transposed, got, 1e-12)


def test_a_step_left_out_is_seen() -> None:
    rng = np.random.default_rng(0)
    for shape, step, shows in (((5, 7), 6, True), ((6, 6), 6, False), ((6, 6), 3, True)):
        x, delta, w = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=shape[1])
        error = oracles.relative_error(six_steps(x, delta, w, without=step), six_steps(x, delta, w))
        assert (error > 0.1) == shows
        assert (error == 0) == (not shows)
