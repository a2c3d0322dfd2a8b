"""Learning-rate schedules: a linear warmup, then constant, or linear or cosine decay to a floor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SCHEDULES = ("cosine", "linear", "constant")


class Schedule(NamedTuple):
    """The learning rates of a run, or of the part of it after a change of these settings."""

    since: int  # the first step
    steps: int  # the steps of the whole run
    peak: float
    warmup: int
    kind: str
    floor: float  # the final rate as a fraction of the peak


def rate_in(schedules: Sequence[Schedule], step: int) -> float:
    """The learning rate of a step in a run whose settings changed: each schedule is valid from its first step on.

    After a change, the rate moves linearly over the warmup steps from its last value to the peak, then decays to the
    floor at the new last step.
    """
    k = max(i for i, one in enumerate(schedules) if one.since <= step)
    since, steps, peak, warmup, kind, floor = schedules[k]
    before = rate_in(schedules[:k], since - 1) if since else 0.0
    if step - since < warmup:
        return before + (peak - before) * (step - since + 1) / warmup
    return learning_rate(step - since, steps - since, peak, warmup, kind, floor)


def learning_rate(step: int, steps: int, peak: float, warmup: int, kind: str = "cosine", floor: float = 0.1) -> float:
    """The learning rate of step 0, 1, ..., steps − 1. `floor` is the final rate as a fraction of the peak."""
    if kind not in SCHEDULES:
        raise ValueError(f"unknown schedule {kind!r}; choose from {', '.join(SCHEDULES)}")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[kind]
    return peak * (share if kind == "constant" else floor + (1 - floor) * share)
