"""The checker's own arithmetic: derivatives, budgets, factors and patterns, on functions with known results."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onfoot.check.budget import ALLOWED, UNIT, allowed, distance, magnitudes, norm
from onfoot.check.engines import InstallationReport, OpResult
from onfoot.check.factors import candidates, recognise
from onfoot.check.general import _ratio
from onfoot.check.known import checked_dtypes, measure
from onfoot.check.layer import Pieces
from onfoot.check.locate import pattern
from onfoot.check.numeric import derivative


@pytest.mark.parametrize(
    ("function", "right"),
    [(math.sin, 1.0), (math.exp, 1.0), (lambda x: 1 / (2 + x), -0.25), (lambda x: x**3 + 5 * x, 5.0), (math.cos, 0.0)],
)
def test_derivatives_are_within_their_error_estimate(function: object, right: float) -> None:
    found = derivative(function, 1e-16)  # type: ignore[arg-type]
    assert abs(found.value - right) <= max(found.error, 1e-13) <= 1e-9 and not found.has_kink
    assert found.agrees(right, 1e-9) and not found.agrees(right + 1e-6, 1e-9)


def test_extrapolation_gains_two_orders_with_every_column() -> None:
    for function in (math.sin, math.exp, lambda x: 1 / (2 + x)):
        assert derivative(function, 1e-16).error < 5e-14


def test_noise_makes_the_steps_larger_and_the_error_honest() -> None:
    rng = np.random.default_rng(0)
    noise = 1e-6
    found = derivative(lambda x: math.sin(x) + noise * rng.standard_normal(), noise)
    exact = derivative(math.sin, 1e-16)
    assert abs(found.value - 1) <= 5 * found.error and found.error > 1e3 * exact.error and found.step >= exact.step
    assert found.error >= 2 * noise / 0.25


def test_a_kink_has_two_sides_and_everything_between_agrees() -> None:
    found = derivative(lambda x: 3 * x if x > 0 else -x, 1e-16)
    assert found.has_kink
    assert (found.left, found.right) == pytest.approx((-1, 3))
    assert (found.value, found.error) == pytest.approx((1, 2))
    for value, agrees in ((-1.0, True), (0.0, True), (3.0, True), (3.1, False), (-1.1, False)):
        assert found.agrees(value, 1e-6) == agrees, value


def test_norms_ignore_non_finite_entries_and_do_not_overflow() -> None:
    assert norm(np.array([3.0, np.nan, 4.0, np.inf])) == pytest.approx(5)
    assert norm(np.array([3e300, 4e300])) == pytest.approx(5e300)
    assert norm(np.zeros(3)) == norm(np.zeros(0)) == 0
    assert distance(np.array([1.0, np.nan]), np.array([4.0, 1.0])) == 3


def test_a_magnitude_is_the_size_of_the_terms_that_cancel() -> None:
    big, small = np.full(50, 1e6), np.full(50, 1e6 - 1)

    def run(pieces: Pieces) -> tuple[np.ndarray, ...]:
        return (pieces.minus(big, small), pieces.twice(small))

    pieces = Pieces(minus=lambda a, b: a - b, twice=lambda a: 2 * a)
    cancelled, plain = magnitudes(run, pieces)
    assert cancelled == pytest.approx(math.sqrt(2 * 50) * 1e6, rel=0.25)  # not that of the difference, √50
    assert plain == pytest.approx(2 * math.sqrt(50) * 1e6, rel=0.25)
    for dtype, unit in (("float64", 2.0**-53), ("float32", 2.0**-24)):
        assert UNIT[dtype] == unit and allowed(10.0, dtype) == 10 * ALLOWED * unit
    assert 1 <= ALLOWED <= 1000


def test_an_error_is_relative_unless_the_right_gradient_is_noise() -> None:
    right = np.array([3.0, 4.0])
    found = measure("dx", right * 1.01, right, 1e-6)
    assert found.error == pytest.approx(0.01) and found.allowed == pytest.approx(2e-7)
    assert not found.absolute and not found.ok and found.where
    assert measure("dx", right + 1e-8, right, 1e-6).ok
    noise = measure("dx", np.array([1e-3]), np.array([1e-9]), 1e-6)
    assert noise.absolute and noise.error == pytest.approx(1e-3) and noise.allowed == 1e-6
    assert math.isnan(measure("dx", np.array([np.nan, 4.0]), right, 1e-6).error)
    assert not measure("dx", np.array([np.nan, 4.0]), right, 1e-6).ok


def test_factors_are_recognised_by_name_in_every_case() -> None:
    cases = [{"d_k": 4.0, "n": 7.0}, {"d_k": 9.0, "n": 5.0}]

    def found(*factors: float) -> tuple[str, bool] | None:
        return recognise(list(zip(cases, factors, strict=True)), 1e-9)

    assert found(1.0, 1.0) == ("", True)
    assert found(4.0, 9.0) == ("d_k", True) and found(1 / 7, 1 / 5) == ("n", False)
    assert found(2.0, 3.0) == ("√d_k", True) and found(1 / 2, 1 / 3) == ("√d_k", False)
    assert found(6.0, 4.0) == ("(n − 1)", True)
    assert found(4 / 3, 9 / 8) == ("d_k/(d_k − 1)", True) and found(6 / 7, 4 / 5) == ("n/(n − 1)", False)
    assert found(3.0, 3.0) == ("3", True) and found(2.0, 5.0) is None
    assert candidates({"n": 1.0})["n/(n − 1)"] == math.inf


def test_wrong_entries_are_described() -> None:
    wrong = np.zeros((4, 5), dtype=bool)
    wrong[:, -1] = True
    assert pattern(wrong) == "4 of 20 entries are wrong; along axis 1: the last index"
    wrong[:] = False
    wrong[0] = True
    assert pattern(wrong) == "5 of 20 entries are wrong; along axis 0: index 0"
    wrong[:] = True
    assert pattern(wrong) == "every entry is wrong" and pattern(np.array([True])) == "its only entry is wrong"
    wrong[2, 3] = False
    assert pattern(wrong).startswith("19 of 20 entries are wrong")
    wrong[:] = False
    wrong[2, 3] = True
    assert pattern(wrong) == "1 of 20 entries is wrong: [2, 3]"
    rows = np.zeros((6, 2), dtype=bool)
    rows[1:4] = True
    assert pattern(rows) == "6 of 12 entries are wrong; along axis 0: indices 1 to 3"
    rows[:] = True
    rows[4] = False
    assert pattern(rows) == "10 of 12 entries are wrong; along axis 0: all but index 4"
    square = np.triu(np.ones((4, 4)), 1) > 0
    assert pattern(square).endswith("; all above the diagonal")
    assert pattern(square.T).endswith("; all below the diagonal")
    assert pattern(np.eye(4) > 0).endswith("; only the diagonal")


def test_a_factor_is_named_only_where_all_wrong_entries_share_it() -> None:
    right, wrong = np.array([1.0, 2.0, 4.0]), np.ones(3, dtype=bool)
    assert _ratio(3 * right, right, wrong) == "; these are 3 times the correct values"
    assert _ratio(-right, right, wrong) == "; these have the wrong sign"
    assert _ratio(0 * right, right, wrong) == "; these are 0"
    assert _ratio(np.array([2.0, 6.0, 4.0]), right, wrong) == ""
    assert _ratio(3 * right, right, np.array([True, False, False])) == ""


def test_an_installation_passes_if_all_of_it_does() -> None:
    right, wrong = OpResult("numpy", "a", True, 0.0), OpResult("numpy", "b", False, 1.0)
    assert InstallationReport([right, right], {}, 0.0).passed and not InstallationReport([right, wrong], {}, 0.0).passed
    assert not InstallationReport([right, wrong], {}, 0.0) and InstallationReport([right], {}, 0.0)


def test_dtypes_are_put_in_order_the_most_exact_first() -> None:
    assert checked_dtypes(["float32", "float64", "float32"]) == ["float64", "float32"]
    assert checked_dtypes("float32") == ["float32"]
