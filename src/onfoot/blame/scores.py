"""Scores of training examples: how much higher a query's loss would be if an example had not been trained on.

The score of an example is minus the derivative of the query's loss with respect to the example's weight in training,
summed over the steps that saw it. It predicts, to first order, by how many nats the loss rises if the example's targets
are left out of every step: positive scores helped, negative ones hurt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onfoot.blame.adjoint import Adjoints, update_backward
from onfoot.blame.replay import Replay, Step
from onfoot.data.batches import NO_EXAMPLE
from onfoot.models.second_order import tangent_pass
from onfoot.ops.cross_entropy import IGNORE


@dataclass
class Scores:
    """The scores of one query."""

    totals: np.ndarray  # (examples,)
    by_step: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # example -> its steps, with their scores
    tokens: dict[int, np.ndarray] = field(default_factory=dict)  # example -> the score of each of its positions

    @classmethod
    def zeros(cls, n_examples: int) -> Scores:
        return cls(np.zeros(n_examples))

    def add(self, step: int, numbers: np.ndarray, values: np.ndarray) -> None:
        """Adds the scores (B, T) of one microbatch's tokens, whose examples are `numbers` (B, T)."""
        for row, row_values in zip(numbers, values, strict=True):
            cuts = np.flatnonzero(np.diff(row)) + 1
            for begin, end in zip([0, *cuts], [*cuts, len(row)], strict=True):
                example = int(row[begin])
                if example != NO_EXAMPLE:
                    self._add_example(step, example, row_values[begin:end])

    def _add_example(self, step: int, example: int, values: np.ndarray) -> None:
        score = float(values.sum())
        self.totals[example] += score
        self.by_step.setdefault(example, []).append((step, score))
        self._add_tokens(example, values)

    def _add_tokens(self, example: int, values: np.ndarray) -> None:
        self.tokens[example] = self.tokens[example] + values if example in self.tokens else values.copy()

    def merge(self, other: Scores) -> None:
        """Adds the scores of another query: steps that are in both stay one step."""
        self.totals += other.totals
        for example, seen in other.by_step.items():
            mine = dict(self.by_step.get(example, ()))
            self.by_step[example] = [(step, score + mine.get(step, 0.0)) for step, score in seen]
            self._add_tokens(example, other.tokens[example])


def replay_backwards(
    replay: Replay,
    steps: Iterable[Step],
    gradients: Sequence[np.ndarray],
    n_examples: int,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[Scores]:
    """The scores for each of several queries, given the gradients of their losses at the end of the last step.

    `steps` are the run's, last first. `on_step` is called with the number of each when it is done.
    """
    queries = [(Adjoints.of_query(gradient), Scores.zeros(n_examples)) for gradient in gradients]
    for step in steps:
        for adjoints, scores in queries:
            step_backwards(replay, step, adjoints, scores)
        on_step(step.number)
    return [scores for _, scores in queries]


def step_backwards(replay: Replay, step: Step, adjoints: Adjoints, scores: Scores) -> None:
    """Adds a step's scores; the adjoints after the step become those before it."""
    model, layout = replay.model, replay.layout
    dg = update_backward(adjoints, step.m, step.v, step.gradient, replay.decay, step.settings)
    size = float(max(dg.max(), -dg.min()))
    if size == 0.0:  # the query does not depend on this step
        return
    replay.put_params(step.params)
    direction = layout.views(dg / size)  # any scale fits float32
    batches = replay.microbatches(step.number)
    divisor = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
    dots = []
    for batch in batches:
        tangent = tangent_pass(
            model,
            batch.tokens,
            batch.targets,
            direction,
            divisor=divisor,
            segments=batch.segments,
            dropout_seed=batch.dropout_seed,
            gradients=False,
        )
        product = layout.flat(tangent.hvp)
        product *= size
        adjoints.params += product  # eq BL.7
        dots.append(size * np.asarray(tangent.token_dots, dtype=np.float64))
    mean = sum(float(d.sum()) for d in dots) / divisor
    for batch, numbers, d in zip(batches, replay.trainer.source.example_numbers(step.number), dots, strict=True):
        scores.add(step.number, numbers, np.where(batch.targets == IGNORE, 0.0, mean - d))  # eq BL.6
