"""The run trained again without some examples: what the scores predict, measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from onfoot.blame.query import Query
from onfoot.blame.replay import Replay
from onfoot.data.batches import ALL, Batch, Share
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.sources import Source


class WithoutExamples:
    """A source of the same batches; from step `first` on, the targets of some examples are ignored and do not count."""

    def __init__(self, source: Source, left_out: Collection[int], first: int) -> None:
        self.source, self.left_out, self.first = source, np.array(sorted(left_out), dtype=np.int64), first

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]:
        if step < self.first:
            return self.source.microbatches(step)
        pairs = zip(self.source.microbatches(step), self.source.example_numbers(step), strict=True)
        return [
            batch._replace(targets=np.where(np.isin(numbers, self.left_out), IGNORE, batch.targets))
            for batch, numbers in pairs
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def retrained_losses(
    replay: Replay,
    last: int,
    queries: Sequence[Query],
    left_out: Collection[int],
    on_step: Callable[[], None] = lambda: None,
    first: int = 0,
) -> list[float]:
    """The losses of the queries after steps 0 ... last − 1, without the examples `left_out` from step `first` on."""
    trainer, source = replay.trainer, replay.trainer.source
    trainer.source = WithoutExamples(source, left_out, first)
    try:
        replay.put(0, replay.initial)
        while trainer.state.step < last:
            trainer.step(trainer.options.learning_rate(trainer.state.step))
            trainer.state.step += 1
            on_step()
        return [query.loss(replay.model) for query in queries]
    finally:
        trainer.source = source
