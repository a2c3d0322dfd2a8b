"""The three attempts at a score, and the bilinear form: what each can express, and what training can change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onfoot.ops import Head, head_backward, head_forward
from onfoot.ops.attention import attention_weights, softmax_backward
from oracles import assert_close, autograd

T, D, D_RHO = 7, 6, 3


def tokens_and_head(seed: int = 0) -> tuple[np.ndarray, Head]:
    rng = np.random.default_rng(seed)
    dims = [(D, D_RHO), (D_RHO,), (D, D_RHO), (D_RHO,), (D, 4), (4,)]
    return rng.normal(size=(T, D)), Head(*(rng.normal(size=shape) for shape in dims))


@pytest.mark.parametrize("seed", range(5))
def test_scores_of_the_tokens_themselves_are_symmetric_and_led_by_the_longest(seed: int) -> None:
    a, head = tokens_and_head(seed)
    for x in (a, a @ head.w_q + head.b_q):  # the first and the second attempt
        scores = x @ x.T
        np.testing.assert_allclose(scores, scores.T, rtol=1e-13)
        assert np.linalg.eigvalsh(scores).min() > -1e-10
        assert (scores <= np.maximum.outer(np.diag(scores), np.diag(scores)) + 1e-12).all()
        longest = np.diag(scores).argmax()
        assert scores[longest].argmax() == longest
        assert attention_weights(x, x, causal=False)[longest].argmax() == longest


def test_the_first_attempt_gives_a_head_nothing_to_learn() -> None:
    a, head = tokens_and_head()
    leaves = [torch.from_numpy(x).requires_grad_() for x in head]
    x = torch.from_numpy(a)
    first = ((x @ x.T).softmax(-1) @ (x @ leaves[4] + leaves[5])).square().sum()
    gradients = torch.autograd.grad(first, leaves, allow_unused=True)
    assert [g is None for g in gradients] == [True, True, True, True, False, False]  # of w_v and b_v only
    q = x @ leaves[0] + leaves[1]
    second = ((q @ q.T).softmax(-1) @ (x @ leaves[4] + leaves[5])).square().sum()
    assert torch.autograd.grad(second, leaves[0])[0].abs().min() > 1e-9


def test_two_projections_give_scores_that_are_not_symmetric() -> None:
    a, head = tokens_and_head()
    scores = (a @ head.w_q + head.b_q) @ (a @ head.w_k + head.b_k).T
    off = ~np.eye(T, dtype=bool)
    assert np.abs(scores - scores.T)[off].min() > 1e-3
    rho = attention_weights(a @ head.w_q, a @ head.w_k, causal=False)
    assert (rho.argmax(axis=1) != np.arange(T)).any()  # no token must look at itself most


def test_a_bilinear_score_of_low_rank_is_that_of_queries_and_keys() -> None:
    a, head = tokens_and_head()
    w = head.w_q @ head.w_k.T
    assert_close(a @ w @ a.T, (a @ head.w_q) @ (a @ head.w_k).T, 1e-13)
    rho = attention_weights(a @ head.w_q, a @ head.w_k, causal=False)
    assert_close(rho, torch.from_numpy(a @ w @ a.T / D_RHO**0.5).softmax(-1).numpy(), 1e-13)
    assert np.linalg.matrix_rank(w) == D_RHO
    rng = np.random.default_rng(1)
    any_matrix = rng.normal(size=(D, D))  # every matrix is that of a head of full width
    assert_close((a @ any_matrix) @ (a @ np.eye(D)).T, a @ any_matrix @ a.T, 1e-13)
    left, sizes, right = np.linalg.svd(any_matrix)  # and the rest is the error of the best factors
    nearest = (left[:, :D_RHO] * sizes[:D_RHO]) @ right[:D_RHO]
    assert np.linalg.norm(nearest - any_matrix) == pytest.approx(np.linalg.norm(sizes[D_RHO:]), rel=1e-10)
    assert 2 * 768 * 64 == 98_304 and 768 * 768 == 589_824


def test_the_gradients_of_the_factors_follow_from_that_of_the_bilinear_matrix() -> None:
    a, head = tokens_and_head()
    head = head._replace(b_q=np.zeros(D_RHO), b_k=np.zeros(D_RHO))
    dy = np.random.default_rng(2).normal(size=(T, 4))
    _, saved = head_forward(a, head)
    _, grads = head_backward(dy, saved)
    d_raw = softmax_backward(dy @ saved.v.T, saved.rho) / np.sqrt(D_RHO)
    d_w = a.T @ d_raw @ a
    future = torch.ones(T, T).triu(1).bool()

    def mix(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # the values do not move
        scores = x @ w @ x.T / D_RHO**0.5
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ torch.from_numpy(saved.v)

    w = head.w_q @ head.w_k.T
    expected_w, expected_a = autograd(mix, [w, a], dy)
    assert_close(d_w, expected_w, 1e-12)
    assert_close(d_raw @ a @ w.T + d_raw.T @ a @ w, expected_a, 1e-12)
    assert_close(grads.w_q, expected_w @ head.w_k, 1e-12)  # eq 31.a
    assert_close(grads.w_k, expected_w.T @ head.w_q, 1e-12)  # eq 31.b


def test_the_bias_of_queries_favours_keys_the_same_for_every_query() -> None:
    a, head = tokens_and_head()
    q, k = a @ head.w_q, a @ head.w_k
    whole = attention_weights(q + head.b_q, k + head.b_k, causal=False)
    per_key = head.b_q @ k.T  # (T,)
    scores = torch.from_numpy(q @ k.T + per_key) / D_RHO**0.5
    assert_close(whole, scores.softmax(-1).numpy(), 1e-13)
