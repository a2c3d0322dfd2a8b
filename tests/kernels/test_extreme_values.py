"""Very large, very small and nearly equal numbers: what float32 loses in squares, in 1 − β, and in small gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onfoot import kernels, ops
from onfoot.ops.dropout import dropout_pattern

pytest.importorskip("numba")
TABLE = kernels.table()


def exactly(name: str, x: np.ndarray, weight: np.ndarray, dy: np.ndarray, eps: float) -> tuple[np.ndarray, ...]:
    bias = () if name == "rms_norm" else (0 * weight.astype(np.float64),)
    y, saved = getattr(ops, f"{name}_forward")(x.astype(np.float64), weight.astype(np.float64), *bias, eps)
    return y, *getattr(ops, f"{name}_backward")(dy.astype(np.float64), saved)


@pytest.mark.parametrize("scale", [1e30, 1e25, 1e18, 1e-16, 1e-30])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_norm_of_very_large_or_small_numbers_is_that_of_float64(name: str, scale: float, threads: int) -> None:
    rng = np.random.default_rng(0)
    x = (scale * rng.standard_normal((40, 33))).astype(np.float32)
    x[5] = rng.standard_normal(33)  # a usual row between them
    weight, dy = (rng.standard_normal(shape).astype(np.float32) for shape in (33, (40, 33)))
    eps = 0.0 if scale < 1 else 1e-5
    bias = () if name == "rms_norm" else (np.zeros(33, np.float32),)
    y, saved = TABLE[f"{name}_forward"](x, weight, *bias, eps)
    ours = y, *TABLE[f"{name}_backward"](dy, saved)
    for mine, right in zip(ours, exactly(name, x, weight, dy, eps), strict=True):
        rows = zip(np.atleast_2d(mine), np.atleast_2d(right), strict=True)  # gradients of x differ by 1e60
        assert all(np.linalg.norm(a.astype(np.float64) - b) <= 1e-5 * np.linalg.norm(b) for a, b in rows)


@pytest.mark.parametrize("engine", ["numpy", "numba"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_at_1e30_are_finite_on_every_engine(name: str, engine: str) -> None:
    table = TABLE if engine == "numba" else {n: getattr(ops, n) for n in TABLE if hasattr(ops, n)}
    x, weight = np.full((3, 5), 1e30, np.float32), np.ones(5, np.float32)
    x[:, ::2] *= -1
    bias = () if name == "rms_norm" else (weight,)
    with np.errstate(over="ignore"):
        y, saved = table[f"{name}_forward"](x, weight, *bias)
        results = y, *table[f"{name}_backward"](np.ones_like(x), saved)
    assert all(np.isfinite(r).all() for r in results)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_squares_are_summed_in_float64(scale: float) -> None:
    x = (scale * np.random.default_rng(0).standard_normal(100_000)).astype(np.float32)
    assert TABLE["sum_of_squares"](x) == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-12)


@pytest.mark.parametrize("beta", [0.9, 0.999, 1 - 1e-6, 1 - 1e-12, 0.0])
@pytest.mark.parametrize("steps", [1, 7, 10_000])
def test_corrections_have_no_cancellation(beta: float, steps: int) -> None:
    """Against whole numbers: beta is a fraction of integers, and so is 1 − betaᵗ."""
    from fractions import Fraction

    from onfoot.ops.update import correction

    if steps > 100:  # the fraction would have half a million digits
        right = 1 - beta**steps if beta < 0.99 else -math.expm1(steps * math.log1p(-(1 - beta)))
    else:
        right = float(1 - Fraction(beta) ** steps)
    assert correction(beta, steps) == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("beta", [0.999, 0.9999, 1 - 2**-20, 1 - 2**-30])
def test_the_running_mean_of_squares_grows_by_one_minus_beta(beta: float) -> None:
    """In float32, 1 − 0.9999 keeps four digits, and 1 − (1 − 2⁻³⁰) none."""
    p, m, v, g = (np.zeros(3, np.float32) for _ in range(4))
    g += 1
    TABLE["adamw_updates"]([(p, m, v, g, 0.0)], 1e-3, (0.9, beta), 1e-8, 1, 1.0)
    assert np.abs(v / (1 - beta) - 1).max() < 1e-6
    assert np.abs(m / 0.1 - 1).max() < 1e-6
    assert np.abs(p / -1e-3 - 1).max() < 1e-4


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("pair", ["attention", "grouped_query"])
@pytest.mark.parametrize("tokens", [5, 40, 130])
@pytest.mark.parametrize("dropped", [False, True])
def test_each_gradient_of_attention_is_right_by_its_own_norm(
    dropped: bool, pair: str, tokens: int, scale: float, threads: int
) -> None:
    """Small queries and keys have small gradients of scores: the large gradient of v must not hide their errors."""
    rng = np.random.default_rng(tokens)
    heads = 4 if pair == "grouped_query" else 2
    q, dy = (rng.standard_normal((2, heads, tokens, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, tokens, 16)).astype(np.float32) for _ in range(2))
    q, k = np.float32(scale) * q, np.float32(scale) * k
    keep = dropout_pattern((2, heads, tokens, tokens), 0.3, tokens) if dropped else None
    _, saved = TABLE[f"{pair}_forward"](q, k, v, True, None, keep)
    ours = TABLE[f"{pair}_backward"](dy, saved)
    _, exact = getattr(ops, f"{pair}_forward")(*(x.astype(np.float64) for x in (q, k, v)), True, None, keep)
    truth = getattr(ops, f"{pair}_backward")(dy.astype(np.float64), exact)
    for name, mine, right in zip("qkv", ours, truth, strict=True):
        assert np.linalg.norm(mine - right) <= 4e-6 * np.linalg.norm(right), name


@pytest.mark.parametrize("pair", ["attention", "grouped_query"])
def test_a_query_that_sees_one_key_has_no_gradient_of_scores(pair: str) -> None:
    """ρ is 1 then, whatever the score: row 1 of Δ_causal is exactly 0, and each row of packed single tokens."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((2, 3, 11, 16)).astype(np.float32) for _ in range(4))
    _, saved = TABLE[f"{pair}_forward"](q, k, v, True, np.arange(11)[None, None])  # each sees itself alone
    dq, dk, dv = TABLE[f"{pair}_backward"](dy, saved)
    assert not dq.any() and not dk.any() and np.abs(dv - dy).max() < 1e-6
    keep = dropout_pattern((2, 3, 11, 11), 0.3, 0)
    for dropped in (None, keep):
        dq, _, _ = TABLE[f"{pair}_backward"](dy, TABLE[f"{pair}_forward"](q, k, v, True, None, dropped)[1])
        assert not dq[..., 0, :].any() and dq[..., 1:, :].any()


def test_equal_values_leave_nothing_of_the_scores_gradient() -> None:
    """All of Δ vᵗ is alike in a row: what is left is a rounding of it, at most."""
    rng = np.random.default_rng(0)
    q, k, dy = (rng.standard_normal((1, 2, 40, 16)).astype(np.float32) for _ in range(3))
    v = np.broadcast_to(rng.standard_normal((1, 2, 1, 16)).astype(np.float32), (1, 2, 40, 16)).copy()
    dq, dk, _ = TABLE["attention_backward"](dy, TABLE["attention_forward"](q, k, v)[1])
    size = np.abs(dy @ v.swapaxes(-1, -2)).max()
    assert max(np.abs(dq).max(), np.abs(dk).max()) < 4 * np.finfo(np.float32).eps * size


@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("name", ["attention", "grouped_query"])
def test_attention_weights_of_huge_scores_sum_to_1_on_the_way_back(name: str, scale: float, n: int) -> None:
    """ρ is computed again there: with Σ ρ = 1, the values' gradients have the sum of the upstream ones."""
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((2, 3, n, 8)).astype(np.float32) for _ in range(4))
    _, saved = TABLE[f"{name}_forward"](scale * q, scale * k, v)
    dq, dk, dv = TABLE[f"{name}_backward"](dy, saved)
    np.testing.assert_allclose(dv.sum(axis=2), dy.sum(axis=2), rtol=1e-4, atol=1e-5)
    assert np.isfinite(dq).all() and np.isfinite(dk).all()
