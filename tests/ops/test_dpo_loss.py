"""The DPO loss against autograd and finite differences, in float64, on margins of all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onfoot.arrays import to_numpy
from onfoot.ops.dpo import dpo_loss_backward, dpo_loss_forward
from oracles import assert_close, autograd, directional_difference

BETA, SMOOTHING, DIVISOR = 0.7, 0.2, 5.0


def four(seed: int = 0, scale: float = 3.0) -> list[np.ndarray]:
    """Log-probabilities of 7 pairs: chosen and rejected, of the policy and of the reference."""
    return list(-np.abs(np.random.default_rng(seed).normal(0, scale, (4, 7))))


def reference(
    chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, beta: float = BETA, smoothing: float = SMOOTHING
) -> torch.Tensor:
    """As TRL writes it: the difference of the two log-ratios."""
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    losses = -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
    return losses.sum() / DIVISOR


def check(backward: Callable[..., Any], smoothing: float, as_arrays: Callable[[np.ndarray], Any] = np.asarray) -> None:
    arrays = four()
    loss, saved = dpo_loss_forward(*map(as_arrays, arrays), BETA, smoothing, DIVISOR)
    expected = reference(*map(torch.tensor, arrays), smoothing=smoothing)
    assert_close(float(loss), expected.item(), 1e-13, "loss")
    grads = [to_numpy(g) for g in backward(1.7, saved)]

    def policy(chosen: Any, rejected: Any) -> torch.Tensor:
        return reference(chosen, rejected, *map(torch.tensor, arrays[2:]), smoothing=smoothing)

    for got, by_autograd in zip(grads, autograd(policy, arrays[:2], np.array(1.7)), strict=True):
        assert_close(got, by_autograd, 1e-12, "gradient")

    def value(chosen: np.ndarray, rejected: np.ndarray) -> np.ndarray:
        return dpo_loss_forward(chosen, rejected, *arrays[2:], BETA, smoothing, DIVISOR)[0]

    directions = four(seed=5)[:2]
    slope = directional_difference(value, arrays[:2], directions, 1.7, 1e-4)
    assert abs(slope - sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))) <= 1e-9


@pytest.mark.parametrize("as_arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
def test_gradients_equal_autograd_and_finite_differences(
    smoothing: float, as_arrays: Callable[[np.ndarray], Any]
) -> None:
    check(dpo_loss_backward, smoothing, as_arrays)


WRONG: dict[str, Callable[..., Any]] = {
    "sign": lambda dloss, s: dpo_loss_backward(dloss, s)[::-1],
    "both pushed the same way": lambda dloss, s: (dpo_loss_backward(dloss, s)[0],) * 2,
    "beta left out": lambda dloss, s: tuple(g / s.beta for g in dpo_loss_backward(dloss, s)),
    "sigma of the margin": lambda dloss, s: dpo_loss_backward(dloss, s._replace(margin=-s.margin)),
    "the reference ignored": lambda dloss, s: dpo_loss_backward(
        dloss, s._replace(margin=s.beta * (four()[0] - four()[1]))
    ),
    "smoothing ignored": lambda dloss, s: dpo_loss_backward(dloss, s._replace(label_smoothing=0.0)),
    "divisor ignored": lambda dloss, s: dpo_loss_backward(dloss, s._replace(divisor=1.0)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_planted_bug_is_caught(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(WRONG[wrong], SMOOTHING)


def test_margins_of_thousands_neither_overflow_nor_lose_their_gradient() -> None:
    chosen, zero = np.array([-5e3, 5e3, -40.0, 40.0]), np.zeros(4)
    loss, saved = dpo_loss_forward(chosen, zero, zero, zero, 1.0)
    assert float(loss) == pytest.approx(5040, rel=1e-12)
    dchosen, drejected = dpo_loss_backward(1.0, saved)
    assert_close(dchosen, [-1, 0, -1, -np.exp(-40)], 1e-15)
    assert dchosen[3] == pytest.approx(-np.exp(-40), rel=1e-13, abs=0)  # 1 − σ(40) would be 0
    assert (drejected == -dchosen).all()
    small, _ = dpo_loss_forward(chosen[3:], zero[3:], zero[3:], zero[3:], 1.0)
    assert float(small) == pytest.approx(np.exp(-40), rel=1e-13, abs=0)  # log(1 + exp(−40)) would be 0


def test_float32_stays_float32() -> None:
    loss, saved = dpo_loss_forward(*[x.astype(np.float32) for x in four()], 0.1)
    assert loss.dtype == np.float32
    assert all(g.dtype == np.float32 for g in dpo_loss_backward(1.0, saved))
