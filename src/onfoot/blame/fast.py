"""TracIn: gradient dot products at the kept checkpoints, an approximation that needs no replay.

It treats training as plain gradient descent with the gradients of the kept checkpoints: no moments, no clipping, no
curvature. Scores are positive for examples that helped, but they are not in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onfoot.arrays import Array
from onfoot.blame.query import Query
from onfoot.blame.replay import Replay
from onfoot.blame.scores import Scores
from onfoot.models.second_order import tangent_pass
from onfoot.ops.cross_entropy import IGNORE


def segments(replay: Replay, last: int) -> list[tuple[int, int]]:
    """The steps before each kept checkpoint, up to the one before it."""
    ends = sorted(step for step in replay.checkpoints if 0 < step <= last)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def tracin(
    replay: Replay,
    last: int,
    queries: Sequence[Query],
    n_examples: int,
    on_step: Callable[[int], None] = lambda step: None,
    first: int = 0,
) -> list[Scores]:
    """Σ over the steps of lr ⟨∇query, ∇ℓ_e⟩ / D, with the gradients at the first kept checkpoint after each step."""
    scores = [Scores.zeros(n_examples) for _ in queries]
    for begin, end in segments(replay, last):
        replay.put_params(replay.at(end).params)
        directions = [query.gradient(replay.model) for query in queries]
        for step in range(max(begin, first), end):
            for direction, score in zip(directions, scores, strict=True):
                _add(replay, step, direction, score)
            on_step(step)
    return scores


def _add(replay: Replay, step: int, direction: dict[str, Array], scores: Scores) -> None:
    """Adds the dot products of one step's examples with a direction, times the learning rate."""
    lr, batches = replay.trainer.options.learning_rate(step), replay.microbatches(step)
    divisor = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
    for batch, numbers in zip(batches, replay.trainer.source.example_numbers(step), strict=True):
        tangent = tangent_pass(
            replay.model,
            batch.tokens,
            batch.targets,
            direction,
            divisor=divisor,
            segments=batch.segments,
            backward=False,
        )
        scores.add(step, numbers, lr * np.asarray(tangent.token_dots, dtype=np.float64))  # eq BL.9
