"""The general checker: any function against finite differences of itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onfoot import ops
from onfoot.check import assert_gradients, gradients
from onfoot.check.numeric import derivative

RNG = np.random.default_rng(5)
X, W, B = RNG.standard_normal((3, 4, 5)), 1 + RNG.standard_normal(5), RNG.standard_normal(5)
NAMES = ["dx", "dweight", "dbias"]


def spoilt(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda dy, saved: change(*ops.layer_norm_backward(dy, saved))


def check(backward: Callable[..., Any], **options: Any) -> Any:
    return gradients(ops.layer_norm_forward, backward, [X, W, B], saved=True, names=NAMES, **options)


def test_a_right_pair_passes_in_float64_and_float32() -> None:
    report = check(ops.layer_norm_backward, dtypes=["float64", "float32"])
    assert report.passed
    assert {a.dtype for a in report.agreements} == {"float64", "float32"}
    exact = [a for a in report.agreements if a.dtype == "float64"]
    assert all(abs(a.backward - a.forward) < 1e-9 for a in exact)
    assert all(a.allowed < 1e-7 for a in exact)  # what is allowed is not a loose tolerance


def test_the_wrong_argument_the_entries_and_the_factor_are_named() -> None:
    def change(dx, dweight, dbias):
        dx[:, 0] *= 2
        return dx, dweight, -dbias

    report = check(spoilt(change))
    assert report.wrong == ["dx", "dbias"]
    assert "15 of 60 entries are wrong; along axis 1: index 0" in report.where["dx"]
    assert "these are 2 times the correct values" in report.where["dx"]
    assert report.where["dbias"].startswith("every entry is wrong")
    assert "wrong sign" in report.where["dbias"]


def test_one_wrong_entry_is_found_by_its_index() -> None:
    def change(dx, dweight, dbias):
        dx[1, 2, 3] += 0.1
        return dx, dweight, dbias

    assert "1 of 60 entries is wrong: [1, 2, 3]" in check(spoilt(change)).where["dx"]


def test_an_error_of_a_millionth_is_found() -> None:
    report = check(spoilt(lambda dx, dweight, dbias: (dx * (1 + 1e-6), dweight, dbias)))
    assert report.wrong == ["dx"]


def test_an_argument_left_out_is_zero() -> None:
    report = check(spoilt(lambda dx, dweight, dbias: (dx, 0 * dweight, dbias)))
    assert "these are 0" in report.where["dweight"]


def test_a_large_argument_is_sampled() -> None:
    x = np.random.default_rng(0).standard_normal((30, 30))
    report = gradients(np.tanh, lambda x, dout: dout * (1 - np.tanh(x)), [x])
    assert report.where["argument 0"].startswith("of 400 entries sampled, ")


def test_integers_and_settings_are_passed_on() -> None:
    ids, table = np.array([[1, 0, 1]]), np.random.default_rng(0).standard_normal((3, 2))
    report = gradients(ops.embedding_forward, ops.embedding_backward, [ids, table], saved=True)
    assert report.passed and report.arguments == ["argument 1"]


def test_gradients_of_chosen_arguments_only() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 3))
    report = gradients(lambda a, b: a * b, lambda a, b, dout: dout * a, [a, b], wrt=[1], names=["db"])
    assert report.passed and report.arguments == ["db"]


def test_tensors_come_as_tensors() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def backward(x, dout):
        assert isinstance(x, torch.Tensor) and isinstance(dout, torch.Tensor)
        return dout * (1 - x.tanh() ** 2)

    assert gradients(torch.tanh, backward, [x]).passed
    assert gradients(torch.tanh, lambda x, dout: dout * (1 - x.tanh()), [x]).wrong == ["argument 0"]


def test_float32_inputs_are_checked_in_float64() -> None:
    report = gradients(np.sin, lambda x, dout: dout * np.cos(x), [X.astype(np.float32)])
    assert report.passed and report.warnings == []


def test_a_forward_pass_in_float32_is_allowed_its_own_noise_and_no_more() -> None:
    def single(x):
        return np.sin(x.astype(np.float32))

    report = gradients(single, lambda x, dout: dout * np.cos(x), [X])
    assert report.passed and "computes in float32" in report.warnings[0]
    assert not gradients(single, lambda x, dout: 1.1 * dout * np.cos(x), [X]).passed


# Step sizes and kinks


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_step_follows_the_size_of_the_argument(scale: float) -> None:
    x = scale * X

    def forward(x):
        return np.sin(x / scale)

    assert gradients(forward, lambda x, dout: dout * np.cos(x / scale) / scale, [x]).passed
    assert not gradients(forward, lambda x, dout: 1.001 * dout * np.cos(x / scale) / scale, [x]).passed


@pytest.mark.parametrize(
    ("function", "value"), [(np.exp, 1.0), (np.sin, 1.0), (lambda t: np.sin(200 * t), 200.0), (np.tanh, 1.0)]
)
def test_a_derivative_is_within_its_own_error(function: Callable[[float], float], value: float) -> None:
    found = derivative(function, 1e-16)
    assert abs(found.value - value) <= 10 * found.error
    assert found.error < 1e-9 * value and not found.has_kink


def test_a_kink_beside_the_point_is_stepped_around() -> None:
    x = np.array([0.3, -0.2, 1e-3, -1e-3])
    assert gradients(lambda x: np.maximum(x, 0), lambda x, dout: dout * (x > 0), [x]).passed


@pytest.mark.parametrize("at_zero", [0.0, 0.5, 1.0])
def test_at_a_kink_any_value_between_both_sides_is_accepted(at_zero: float) -> None:
    x = np.array([0.3, 0.0, -0.5, 0.0])
    report = gradients(lambda x: np.maximum(x, 0), lambda x, dout: dout * np.where(x == 0, at_zero, x > 0), [x])
    assert report.passed, str(report)
    assert "kinks" in report.warnings[0]


def test_at_a_kink_a_value_outside_is_not() -> None:
    x = np.array([0.3, 0.0, -0.5, 0.0])
    report = gradients(lambda x: np.maximum(x, 0), lambda x, dout: dout * np.where(x == 0, 1.5, x > 0), [x])
    assert "along axis 0: indices 1, 3" in report.where["argument 0"]


# Problems other than wrong values


def test_a_forward_pass_that_cannot_be_differentiated_is_reported() -> None:
    def raising(x):
        raise KeyError("weights")

    def problem(forward):
        (found,) = gradients(forward, lambda x, dout: dout, [X]).problems
        return found.kind

    assert problem(raising) == "raises"
    assert problem(lambda x: x / 0) == "nan"
    assert problem(lambda x: np.argmax(x)) == "type"
    assert problem(lambda x: x + np.random.default_rng().random()) == "random"


def test_problems_of_a_backward_pass_are_reported() -> None:
    def problem(backward):
        (found,) = gradients(np.sin, backward, [X]).problems
        return found.kind

    def mutating(x, dout):
        dout *= np.cos(x)
        return dout

    def raising(x, dout):
        raise RuntimeError("not yet")

    assert problem(raising) == "raises"
    assert problem(mutating) == "mutates"
    assert problem(lambda x, dout: (dout, dout)) == "count"
    assert problem(lambda x, dout: dout[0]) == "shape"
    assert problem(lambda x, dout: np.nan * dout) == "nan"
    assert problem(lambda x, dout: (dout * np.cos(x)).astype(int)) == "type"
    calls = itertools.count()
    assert problem(lambda x, dout: dout * np.cos(x) * (1 + 1e-14 * next(calls))) == "random"


# For users' own tests


def test_assert_gradients_is_silent_or_shows_the_report() -> None:
    assert_gradients(np.sin, lambda x, dout: dout * np.cos(x), [X])
    with pytest.raises(AssertionError, match="wrong: argument 0"):
        assert_gradients(np.sin, lambda x, dout: dout * np.sin(x), [X])
    with pytest.raises(AssertionError, match="γ missing from dx"):
        assert_gradients(lambda x, w, b, dout: ln_without_gamma(x, w, b, dout), layer="layer_norm")
    with pytest.raises(ValueError, match="pass either layer"):
        assert_gradients(np.sin)


def ln_without_gamma(x, weight, bias, dout):
    _, saved = ops.layer_norm_forward(x, np.ones_like(weight), bias)
    return ops.layer_norm_backward(dout, saved)


def test_the_report_shows_both_sides_of_the_agreement() -> None:
    text = str(check(ops.layer_norm_backward))
    assert "⟨v, Jᵗu⟩ yours" in text and "⟨u, J v⟩ numeric" in text
    assert text.endswith("✓ passes: the backward pass agrees with finite differences of the forward pass")
    as_dict = check(spoilt(lambda dx, dweight, dbias: (dx, dweight, 2 * dbias))).to_dict()
    assert as_dict["wrong"] == ["dbias"] and not as_dict["passed"]
