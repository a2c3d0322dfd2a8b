"""The mean and the variance of scores: exactly by enumeration, and by sampling within a confidence bound."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from onfoot.ops import attention_forward
from onfoot.ops.attention import attention_weights, softmax, softmax_backward

SIGMAS = 5.0  # a bound of five standard errors is exceeded once in 1.7 million samples


def expected(d: int, mu_q: float, var_q: float, mu_k: float, var_k: float) -> tuple[float, float]:
    """Mean and variance of q·k by the page's formula."""
    return d * mu_q * mu_k, d * (var_q * var_k + mu_q**2 * var_k + mu_k**2 * var_q)


def mean_and_variance(values: list[Fraction]) -> tuple[Fraction, Fraction]:
    mean = sum(values, Fraction(0)) / len(values)
    return mean, sum(((x - mean) ** 2 for x in values), Fraction(0)) / len(values)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("q_values", [(-1, 1), (0, 1), (-1, 0, 4)], ids=str)
@pytest.mark.parametrize("k_values", [(-1, 1), (-2, 0, 2), (1, 3)], ids=str)
def test_mean_and_variance_are_exact_over_all_values_of_small_distributions(
    d: int, q_values: tuple[int, ...], k_values: tuple[int, ...]
) -> None:
    scores = [
        Fraction(sum(a * b for a, b in zip(q, k, strict=True)))
        for q in product(q_values, repeat=d)
        for k in product(k_values, repeat=d)
    ]
    (mu_q, var_q), (mu_k, var_k) = (mean_and_variance([Fraction(x) for x in v]) for v in (q_values, k_values))
    assert mean_and_variance(scores) == expected(d, mu_q, var_q, mu_k, var_k)  # type: ignore[arg-type, comparison-overlap]
    if (mu_q, mu_k, var_q, var_k) == (0, 0, 1, 1):
        assert mean_and_variance(scores) == (0, d)
        return
    assert mean_and_variance(scores) != (0, d)  # the numbers of standardised entries are theirs alone


def draw(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Entries of mean 0 and variance 1."""
    if kind == "normal":
        return rng.normal(size=shape)
    return rng.uniform(-math.sqrt(3), math.sqrt(3), shape) if kind == "uniform" else rng.choice([-1.0, 1.0], shape)


@pytest.mark.parametrize("kind", ["normal", "uniform", "signs"])
@pytest.mark.parametrize("d", [1, 7, 64])
@pytest.mark.parametrize(("mu_q", "mu_k"), [(0.0, 0.0), (0.5, 0.0), (0.5, -1.0)])
def test_sampled_means_and_variances_are_within_their_confidence_bounds(
    kind: str, d: int, mu_q: float, mu_k: float
) -> None:
    rng, n = np.random.default_rng(0), 40_000
    scores = ((draw(kind, rng, (n, d)) + mu_q) * (draw(kind, rng, (n, d)) + mu_k)).sum(axis=1)
    mean, variance = expected(d, mu_q, 1, mu_k, 1)
    fourth = ((scores - mean) ** 4).mean()
    for raw, scale in ((scores, 1.0), (scores / math.sqrt(d), math.sqrt(d))):
        centre, spread = mean / scale, variance / scale**2
        assert abs(raw.mean() - centre) <= SIGMAS * math.sqrt(spread / n)
        error = math.sqrt((fourth / scale**4 - spread**2) / n)  # of the mean of the squares about the true mean
        assert abs(((raw - centre) ** 2).mean() - spread) <= SIGMAS * error + 1e-12 * spread
        assert SIGMAS * error < 0.25 * spread  # the bound says something


def test_the_bounds_would_notice_the_wrong_formula() -> None:
    """Var(qk) = Var(q) Var(k), which needs means of 0, is far outside where they are not 0."""
    rng, n, d = np.random.default_rng(0), 40_000, 7
    scores = ((rng.normal(size=(n, d)) + 0.5) * (rng.normal(size=(n, d)) - 1)).sum(axis=1)
    error = math.sqrt((((scores - scores.mean()) ** 4).mean() - scores.var() ** 2) / n)
    assert abs(scores.var() - d) > 20 * SIGMAS * error / 5
    assert abs(scores.var() - expected(d, 0.5, 1, -1, 1)[1]) <= SIGMAS * error


@pytest.mark.parametrize("d", [4, 64])
@pytest.mark.parametrize(("mu_q", "mu_k"), [(0.0, 0.0), (0.0, 2.0), (1.5, 0.0), (1.5, 2.0)])
def test_within_a_row_the_mean_of_keys_does_not_count_and_that_of_queries_does(
    d: int, mu_q: float, mu_k: float
) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(mu_q, 1, (3000, 1, d)), rng.normal(mu_k, 1, (3000, 9, d))
    log_weights = np.log(attention_weights(q, k, causal=False))[:, 0]  # the scaled scores, up to a number per row
    within = log_weights.var(axis=1, ddof=1)  # (3000,): unbiased
    assert abs(within.mean() - (1 + mu_q**2)) <= SIGMAS * within.std() / math.sqrt(3000)
    v = rng.normal(size=(3000, 9, 2))
    y = attention_forward(q, k, v, causal=False)[0]
    np.testing.assert_allclose(attention_forward(q, k - mu_k, v, causal=False)[0], y, atol=1e-10)
    moved = attention_forward(q - 1.5, k, v, causal=False)[0]
    assert np.abs(moved - y).max() > 0.1


def test_without_the_scale_the_softmax_saturates_and_its_gradient_fades() -> None:
    rng, d = np.random.default_rng(0), 64
    q, k, dy, v = (rng.normal(size=(200, 64, d)) for _ in range(4))
    raw = q @ k.swapaxes(-1, -2)
    weights = {"raw": softmax(raw), "scaled": attention_weights(q, k, causal=False), "over d": softmax(raw / d)}
    largest, one_hot, faded = {}, {}, {}
    for name, rho in weights.items():
        gradient = np.linalg.norm(softmax_backward(dy @ v.swapaxes(-1, -2), rho), axis=-1)
        largest[name], one_hot[name] = rho.max(axis=-1).mean(), (rho.max(axis=-1) > 0.99).mean()
        faded[name] = (gradient < 0.1).mean()
    assert largest == pytest.approx({"raw": 0.79, "scaled": 0.11, "over d": 0.021}, rel=0.04)
    assert one_hot == pytest.approx({"raw": 0.19, "scaled": 0, "over d": 0}, abs=0.01)
    assert faded == pytest.approx({"raw": 0.22, "scaled": 0, "over d": 0}, abs=0.01)
