"""The learning-rate range test: the rate rises from step to step, and the loss shows which rates train.

The losses are smoothed by a mean over neighbouring steps. The suggestion is the first rate at which the smoothed loss
has made four fifths of its fall to the lowest value: still on the slope, where noise moves it little, and below the
rates at which training stalls or diverges. The lowest point itself lies on a flat valley floor, where noise decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onfoot.models.model import Model
from onfoot.train.automatic import settle
from onfoot.train.averaging import copy_of
from onfoot.train.loop import DivergedError, Trainer
from onfoot.train.options import TrainingOptions
from onfoot.train.parallel import world

STEPS = 120
LOW, HIGH = 1e-6, 1.0  # the first rate and the last
NEIGHBOURS = 3  # steps on either side in the smoothed loss
FEWEST = 4 * NEIGHBOURS  # steps
FRACTION = 0.8  # of the loss's fall, at the suggested rate
MINIMUM_FALL = 0.1  # of the first loss; a fall that is smaller counts as this much
ROW, BAR = 8, 40  # steps per row of the table, and the length of its longest bar
RISEN = 0.5  # the test ends when so much of what the loss had fallen is lost again


@dataclass(frozen=True)
class LrRange:
    """The rates of a range test, the loss at each, and the suggested rate."""

    rates: np.ndarray  # (n,)
    losses: np.ndarray  # (n,), of each step's batch, before its update
    ended: str = ""  # why the test ended before its last rate, if it did

    @property
    def smoothed(self) -> np.ndarray:
        """The mean of each loss and its neighbours, (n,); fewer at both ends."""
        k, n = NEIGHBOURS, len(self.losses)
        return np.array([self.losses[max(i - k, 0) : i + k + 1].mean() for i in range(n)])

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss is lowest."""
        return float(self.rates[self.smoothed.argmin()])

    @property
    def suggestion(self) -> float:
        """The suggested peak learning rate, to two digits."""
        smoothed = self.smoothed
        enough = smoothed <= smoothed[0] - FRACTION * (smoothed[0] - smoothed.min())
        return float(f"{self.rates[enough.argmax()]:.1e}")

    @property
    def doubt(self) -> str:
        """Why the suggestion should not be trusted, or an empty text."""
        i = int(self.smoothed.argmin())
        if i <= NEIGHBOURS:
            return f"no rate of the test lowers the loss below that of the first steps, {self.smoothed[0]:.4f}"
        if not self.ended and i >= len(self.rates) - 1 - NEIGHBOURS:
            return f"the loss still falls at the highest rate of the test, {self.rates[-1]:.1e}: test higher rates"
        return ""

    def report(self) -> str:
        """A table of the losses (smoothed) with a bar for each, the suggestion and its rule."""
        smoothed = self.smoothed
        low, high = smoothed.min(), max(smoothed[: int(smoothed.argmin()) + 1].max(), smoothed.min() + 1e-9)
        lines = [f"learning rate      loss  (mean of {2 * NEIGHBOURS + 1} steps)"]
        for i in sorted({*range(0, len(self.rates), ROW), int(smoothed.argmin()), len(self.rates) - 1}):
            length = round(BAR * min((smoothed[i] - low) / (high - low), 1.0))
            mark = "  <- lowest" if i == int(smoothed.argmin()) else ""
            lines.append(f"{self.rates[i]:13.1e}{smoothed[i]:10.4f}  {'#' * length}{mark}")
        lines.append(self.ended or f"the loss stayed finite up to the highest rate, {self.rates[-1]:.1e}")
        if self.doubt:
            return "\n".join([*lines, f"no suggestion: {self.doubt}"])
        rule = f"the first rate at which the loss has made {FRACTION:.0%} of its fall to {smoothed.min():.4f}"
        return "\n".join([*lines, f"suggestion: --lr {self.suggestion:g}, {rule}"])


def find_lr(
    model: Model,
    data: Any,
    options: TrainingOptions | None = None,
    *,
    steps: int = STEPS,
    low: float = LOW,
    high: float = HIGH,
) -> LrRange:
    """Trains with a rate that rises exponentially from `low` to `high`, and returns the losses and a suggestion.

    `data` and `options` are those of `Trainer`. The test ends early when the loss diverges. Afterwards the model's
    weights are what they were, bit by bit, also after an error.
    """
    options, data = settle(data, model, options)
    check(options, steps, low, high)
    rates = low * (high / low) ** (np.arange(steps) / (steps - 1))
    never = steps + 1  # no evaluation
    quiet: dict[str, Any] = {"quiet": True, "log": "none", "sample_tokens": 0, "patience": 0, "watch": False}
    losses: list[float] = []
    ended = ""
    with _unchanged(model):
        trainer = Trainer(model, data, replace(options, steps=never, eval_every=never, ema=0.0, changes=[], **quiet))
        trainer.learning_rate = lambda step: float(rates[step])
        try:
            for step in trainer:
                losses.append(step.loss)
                ended = _risen(losses, step.lr)
                if ended or len(losses) == steps:
                    break
            else:
                raise KeyboardInterrupt
        except DivergedError:
            ended = f"at {rates[len(losses)]:.1e} the loss or a gradient is not finite: the test ended"
    if len(losses) < FEWEST:
        raise ValueError(f"the loss diverged after {len(losses)} steps from a rate of {low:.1e}; test lower rates")
    return LrRange(rates[: len(losses)], np.array(losses), ended)


def check(options: TrainingOptions, steps: int = STEPS, low: float = LOW, high: float = HIGH) -> None:
    """Raises ValueError for a test that cannot be made."""
    if steps < FEWEST:
        raise ValueError(f"a range test needs at least {FEWEST} steps, got {steps}")
    if not 0 < low < high < math.inf:
        raise ValueError(f"a range test needs rates 0 < low < high, got {low} and {high}")
    if options.dp_clip is not None:
        raise ValueError("a range test is not private: its steps would not count in ε; test on public data")
    if world().size > 1:
        raise ValueError("a range test works in one process; start it without mpiexec")


def _risen(losses: list[float], rate: float) -> str:
    """Why the test ends here: the loss has risen again by much of what it had fallen; empty if it has not."""
    recent, means = FEWEST // 2, np.array(losses)
    if len(losses) < 2 * recent:
        return ""
    means = np.convolve(means, np.full(recent, 1 / recent), "valid")
    fallen, risen = means[0] - means.min(), means[-1] - means.min()
    if risen <= RISEN * max(fallen, MINIMUM_FALL * means[0]):
        return ""
    return f"at {rate:.1e} the loss has risen by more than half of what it had fallen: the test ended"


@contextmanager
def _unchanged(model: Model) -> Iterator[None]:
    """Restores the trained weights afterwards, in the same arrays."""
    before = {name: copy_of(model.params[name]) for name in model.trainable}
    kept = {name: getattr(model, name) for name in ("recompute", "trainable", "config")}
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(model, name, value)
        for name, weights in before.items():
            model.params[name][...] = weights
