"""Attention as weighted averages: what each token may see, the weights, and the parameters of a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onfoot.ops import Head, attention_forward, head_forward
from onfoot.ops.attention import attention_weights, visible
from oracles import assert_close


@pytest.mark.parametrize("t", [1, 2, 6])
def test_causal_attention_is_the_weighted_average_of_the_tokens_so_far(t: int) -> None:
    rng = np.random.default_rng(t)
    q, k, v = (rng.normal(size=(t, d)) for d in (3, 3, 4))
    rho = attention_weights(q, k)
    y, _ = attention_forward(q, k, v)
    assert rho[0, 0] == 1 and np.array_equal(y[0], v[0])  # eq 5.a
    for alpha in range(t):  # eq 5.b to 5.d, 47, 48
        weights = rho[alpha, : alpha + 1]
        assert (weights > 0).all() and weights.sum() == pytest.approx(1, rel=1e-14)  # eq 14
        assert_close(y[alpha], sum(weights[beta] * v[beta] for beta in range(alpha + 1)), 1e-13)
    assert not np.triu(rho, 1).any()  # eq 6
    assert np.array_equal(visible(t, t, True, None, q), np.tri(t, dtype=bool))


def test_all_pairs_are_one_product_and_each_row_has_the_scores_of_one_query() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 5, 3))
    by_pairs = np.array([[sum(q[a, i] * k[b, i] for i in range(3)) for b in range(5)] for a in range(5)])  # eq 7
    assert_close(q @ k.T, by_pairs, 1e-14)  # eq 10
    rho = attention_weights(q, k, causal=False)
    differences = np.log(rho[:, 1:]) - np.log(rho[:, :1])  # eq 12: of the scaled scores of a row
    assert_close(differences, (by_pairs[:, 1:] - by_pairs[:, :1]) / 3**0.5, 1e-13)
    one = rng.normal(size=3)
    changed = attention_weights(np.vstack([q[:2], one, q[3:]]), k, causal=False)
    assert np.array_equal(np.delete(changed, 2, axis=0), np.delete(rho, 2, axis=0))  # eq 11: only its own row


def test_a_head_maps_any_width_to_any_other_with_five_parameters_that_act() -> None:
    rng = np.random.default_rng(0)
    for d, d_rho, d_h in ((5, 2, 3), (4, 7, 1)):  # eq 8, 17
        shapes = Head((d, d_rho), (d_rho,), (d, d_rho), (d_rho,), (d, d_h), (d_h,))
        head = Head(*(rng.normal(size=shape) for shape in shapes))
        a = rng.normal(size=(6, d))
        y, _ = head_forward(a, head)
        assert y.shape == (6, d_h)
        acts = {
            name: not np.allclose(head_forward(a, head._replace(**{name: getattr(head, name) + 1}))[0], y, rtol=1e-9)
            for name in Head._fields
        }
        assert acts == {"w_q": True, "b_q": True, "w_k": True, "b_k": False, "w_v": True, "b_v": True}


class Counted(np.ndarray):
    """An array that counts the multiplications of its matrix products."""

    multiplications = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [np.asarray(x) for x in inputs]
        out = getattr(ufunc, method)(*plain, **options)
        if ufunc is np.matmul:
            Counted.multiplications += out.size * plain[0].shape[-1]
        return out.view(Counted)


@pytest.mark.parametrize(("d_rho", "d_h"), [(3, 5), (8, 2)])
def test_the_work_of_attention_is_quadratic_in_its_tokens(d_rho: int, d_h: int) -> None:
    for t in (8, 16, 32):
        before = Counted.multiplications
        attention_forward(*(np.zeros((t, d)).view(Counted) for d in (d_rho, d_rho, d_h)))
        assert Counted.multiplications - before == t * t * (d_rho + d_h)
