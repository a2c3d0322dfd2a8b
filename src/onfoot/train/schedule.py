"""Learning-rate schedules: a linear warmup, then constant, or linear or cosine decay to a floor."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")


def learning_rate(step: int, steps: int, peak: float, warmup: int, kind: str = "cosine", floor: float = 0.1) -> float:
    """The learning rate of step 0, 1, ..., steps − 1. `floor` is the final rate as a fraction of the peak."""
    if kind not in SCHEDULES:
        raise ValueError(f"unknown schedule {kind!r}; choose from {', '.join(SCHEDULES)}")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[kind]
    return peak * (share if kind == "constant" else floor + (1 - floor) * share)
