"""Differential privacy of a run: how much noise it needs, and the ε that its steps have spent.

A run is (ε, δ)-private if its weights would be nearly as likely without any one training example. Each step samples
every example with the same probability and adds Gaussian noise (`private_step`); the accountant of Google's
`dp-accounting` says which ε these steps amount to, by Rényi differential privacy.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onfoot.train.options import TrainingOptions

LARGEST_NOISE = 1e6  # as a multiple of the clipping norm: more than any useful run needs
CLOSE = 1e-4  # relative: how closely the noise for an ε is found


@dataclass(frozen=True)
class Privacy:
    """The settings of a private run."""

    n_examples: int
    expected: int  # the expected number of examples per step
    clip: float  # c, the maximum norm of each example's gradient
    noise: float  # σ: the noise has the standard deviation σ c
    delta: float | None  # None if there is no noise
    steps: int
    seed: int

    @property
    def rate(self) -> float:
        """The probability that a step samples an example."""
        return self.expected / self.n_examples

    def epsilon(self, steps: int) -> float:
        """ε after so many steps: infinite without noise."""
        if steps == 0:
            return 0.0
        return self._accountant.epsilon(steps) if self.noise and self.delta else math.inf

    @cached_property
    def _accountant(self) -> Accountant:
        assert self.delta is not None
        return Accountant(self.rate, self.noise, self.delta)

    def sample(self, step: int) -> np.ndarray:
        """The examples of a step: each with probability `rate`, by the seed and the step alone."""
        rng = np.random.default_rng([self.seed, step, zlib.crc32(b"sample")])
        return np.flatnonzero(rng.random(self.n_examples) < self.rate)

    def report(self) -> str:
        """The guarantee in one line."""
        how = (
            f"examples clipped to norm {self.clip:g}, noise multiplier {self.noise:.4g}, "
            f"{self.expected:,} of {self.n_examples:,} examples per step on average"
        )
        return f"{self.guarantee(self.steps)} after {self.steps:,} steps: {how}"

    def guarantee(self, steps: int) -> str:
        """The ε and δ of so many steps."""
        if not self.noise:
            return "no privacy guarantee (ε = ∞, no noise)"
        return f"differential privacy: ε = {self.epsilon(steps):.4g}, δ = {self.delta:g}"


class Accountant:
    """The ε of the Poisson-sampled Gaussian mechanism."""

    def __init__(self, rate: float, noise: float, delta: float) -> None:
        dp, self._rdp = _library()
        accountant = self._rdp.RdpAccountant()
        gaussian = dp.GaussianDpEvent(noise)
        with _no_warnings():  # orders whose series does not converge are left out: ε is then larger, never smaller
            accountant.compose(gaussian if rate == 1 else dp.PoissonSampledDpEvent(rate, gaussian))
        self.delta, self._orders, self._one_step = delta, accountant.orders, accountant.rdp

    def epsilon(self, steps: int) -> float:
        """ε after so many steps, whose Rényi divergences add up."""
        return float(self._rdp.compute_epsilon(self._orders, steps * self._one_step, self.delta)[0])


def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The smallest noise multiplier σ for an ε, up to rounding, found by bisection; ε falls as σ grows."""
    low, high = 0.0, 1.0
    while Accountant(rate, high, delta).epsilon(steps) > epsilon:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            reached = Accountant(rate, low, delta).epsilon(steps)
            raise ValueError(
                f"dp_epsilon={epsilon:g} cannot be reached in {steps:,} steps at δ = {delta:g}: even a noise "
                f"multiplier of {low:,.0f} gives ε = {reached:.2g}; pass a larger --dp-epsilon or --dp-delta, or fewer "
                f"steps"
            )
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if middle > 0 and Accountant(rate, middle, delta).epsilon(steps) <= epsilon:
            high = middle
        else:
            low = middle
    return high


def plan(options: TrainingOptions, n_examples: int, ranks: int) -> Privacy:
    """The privacy of a run with these options, or a ValueError where its guarantee would not hold."""
    assert options.dp_clip is not None
    if ranks > 1:
        raise ValueError(f"--dp-clip works in one process, got {ranks} MPI ranks; run without mpiexec")
    expected = options.batch_size * options.accumulate
    if expected > n_examples:
        raise ValueError(
            f"batch_size × accumulate = {expected:,} exceeds the {n_examples:,} training examples, of which a private "
            f"step samples some; pass a smaller --batch-size or --accumulate"
        )
    delta, noise = options.dp_delta, options.dp_noise
    if delta is not None and delta * n_examples >= 1:
        raise ValueError(
            f"dp_delta={delta:g} is not below 1/{n_examples:,}, one over the number of training examples: such a "
            f"guarantee allows publishing a whole example; pass --dp-delta {_power_below(0.1 / n_examples):g} or less"
        )
    if noise is None:
        assert options.dp_epsilon is not None and delta is not None
        noise = noise_for(options.dp_epsilon, delta, expected / n_examples, options.steps)
    elif noise:
        _library()  # a missing package is reported before the run starts
    return Privacy(n_examples, expected, float(options.dp_clip), noise, delta, options.steps, options.seed)


def _power_below(x: float) -> float:
    return 10.0 ** math.floor(math.log10(x))


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hides the warnings of dp-accounting, which logs with absl."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _library() -> tuple[Any, Any]:
    """dp-accounting, and its accountant by Rényi differential privacy."""
    try:
        import dp_accounting
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError:
        raise ValueError('privacy accounting needs dp-accounting: pip install "onfoot[dp]"') from None
    return dp_accounting, rdp_privacy_accountant
