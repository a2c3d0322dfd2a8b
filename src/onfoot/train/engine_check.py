"""Compares the user's own pairs with ours on the arrays of a run: before its first step, and with --watch later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onfoot.data.batches import Batch
from onfoot.data.preference_source import PreferenceSource
from onfoot.models.compare_pairs import Comparison, compare_pairs
from onfoot.train.callbacks import Callback, Validation
from onfoot.train.progress import Reporter
from onfoot.train.source_batches import batches_of_step

if TYPE_CHECKING:
    from onfoot.train.loop import Trainer

WATCHED = 2  # sequences of the validation data
MOST = 8192  # tokens of the first batch that are compared; all have their place in the network


class WrongPairError(ValueError):
    """One of the user's pairs is wrong on the first batch."""


class EngineCheck(Callback):
    """Stops a run whose first batch shows a wrong pair, unless the options allow it."""

    def __init__(self) -> None:
        self.found: Comparison | None = None

    def check(self, trainer: Trainer) -> Comparison | None:
        """Compares the pairs on the first batch, once; raises WrongPairError if the run must not start."""
        if self.found is not None or trainer.state.step >= trainer.options.steps:
            return self.found
        batch, seed = first_batch(trainer), trainer.dropout_seed(0)
        if batch is None:
            return None
        found = compare_pairs(trainer.model, batch.tokens, batch.targets, segments=batch.segments, dropout_seed=seed)
        if not found.right and not trainer.options.engine_unchecked:
            runs = found.first is not None and not found.first.problem
            said = str(found)
            end = "" if said.endswith("?") else "."
            raise WrongPairError(
                f"step {trainer.state.step + 1}: {said}{end} Training stopped before the first update"
                f"{'; --engine-unchecked trains it as it is' if runs else ''}"
            )
        self.found = found
        return found

    def on_begin(self, trainer: Trainer) -> None:
        found = self.check(trainer)
        if found is not None and trainer.world.writes and not trainer.options.quiet:
            said = f"{found.counted}\nwarning: {found}" if found.wrong else str(found)
            Reporter(trainer.options.steps).say(said)

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        batch = evaluation.batch
        if not trainer.options.watch or batch is None or not trainer.world.writes:
            return
        segments = None if batch.segments is None else batch.segments[:WATCHED]
        found = compare_pairs(trainer.model, batch.tokens[:WATCHED], batch.targets[:WATCHED], segments=segments)
        evaluation.record["pairs"] = found.largest if found.largest < float("inf") else None
        evaluation.lines[0] += f"  pairs {found.largest:.1e}"
        if found.wrong:
            evaluation.lines.append(f"  {found}")


def first_batch(trainer: Trainer) -> Batch | None:
    """The first sequences of the next step; of pairs of answers, the better ones. None on a rank without rows."""
    if isinstance(trainer.source, PreferenceSource):
        pairs = trainer.source.microbatches(trainer.state.step, *trainer.share_args)
        batches = [pair.chosen for pair in pairs]
    else:
        batches = batches_of_step(trainer)
    if not batches:
        return None
    batch = batches[0]
    rows = max(1, MOST // max(1, batch.tokens.shape[1]))
    segments = None if batch.segments is None else batch.segments[:rows]
    return Batch(batch.tokens[:rows], batch.targets[:rows], segments)
