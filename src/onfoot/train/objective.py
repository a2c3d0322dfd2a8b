"""What a run minimizes, and one step of it: cross-entropy, that of private steps, or the loss of preference pairs.

An objective makes the steps and measures the validation data of a `Trainer`, which does everything around that. It
does not keep the trainer: the trainer keeps it, and the lock on a run is released with the last name of its trainer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from onfoot.data.batches import Batch
from onfoot.data.preference_source import PreferenceSource
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.dpo import SeededPair, pair_gradients, pair_loss
from onfoot.train.privacy import Privacy
from onfoot.train.private_step import Settings, private_step
from onfoot.train.step import Microbatch, accumulated_step, fused_step

if TYPE_CHECKING:
    from onfoot.models.model import Model
    from onfoot.train.loop import Trainer


class StepResult(NamedTuple):
    """The result of one optimizer step."""

    loss: float  # nats per target, or per pair
    norm: float  # of the gradient, before clipping
    n_tokens: int  # of all ranks
    more: dict[str, Any]  # what else the log records


class Sums(NamedTuple):
    """The validation data of one rank, summed: the ranks' sums are added, then divided by `n`."""

    loss: float
    n: int  # the number of targets, or of pairs
    first: Batch | None
    others: dict[str, float]  # of more figures, by name


class CrossEntropy:
    """The mean cross-entropy of the targets."""

    def step(self, trainer: Trainer, lr: float) -> StepResult:
        batches = [Batch(*batch) for batch in trainer.source.microbatches(trainer.state.step, *trainer.share_args)]
        n_targets = sum(int((b.targets != IGNORE).sum()) for b in batches)
        divisor, n_tokens = trainer.world.sum(n_targets, sum(b.tokens.size for b in batches))  # over all ranks
        if divisor == 0:
            where = f"step {trainer.state.step + 1}"
            raise trainer.world.agreed(ValueError(f"{where}: all {n_tokens:.0f} targets are ignored ({IGNORE})"))
        microbatches = seeded(trainer, batches)
        model, optimizer, on_gradients = trainer.model, trainer.optimizer, trainer.on_gradients()
        if len(microbatches) == 1 and trainer.world.size == 1 and not trainer.options.clip and on_gradients is None:
            loss, norm = fused_step(model, optimizer, microbatches[0], int(divisor), lr, trainer.diverged)
        else:
            settings = lr, trainer.options.clip, trainer.diverged, trainer.accumulator, trainer.world
            loss, norm = accumulated_step(model, optimizer, microbatches, int(divisor), *settings, on_gradients)
        return StepResult(loss, norm, int(n_tokens), {})

    def validate(self, trainer: Trainer) -> Sums:
        """The summed loss and the number of targets of this rank's validation batches, and the first of them."""
        total, n_targets = 0.0, 0
        first = None
        for batch in (Batch(*b) for b in trainer.source.validation(*trainer.share_args)):
            first = first or batch
            n = int((batch.targets != IGNORE).sum())
            loss = trainer.model.loss
            total += loss(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments) if n else 0.0
            n_targets += n
        return Sums(total, n_targets, first, {})

    def describe(self, means: dict[str, float]) -> str:
        """The figures beside the validation loss, in words."""
        return ""


class PrivateCrossEntropy(CrossEntropy):
    """The same, on a random sample of the examples: each one's gradient is clipped, and noise is added to their sum."""

    def __init__(self, privacy: Privacy) -> None:
        self.privacy = privacy

    def step(self, trainer: Trainer, lr: float) -> StepResult:
        privacy, step = self.privacy, trainer.state.step
        batches: list[Batch] = trainer.source.batches_of(privacy.sample(step))
        settings = Settings(privacy.clip, privacy.noise, privacy.expected, privacy.seed, step)
        microbatches = seeded(trainer, batches)
        result = private_step(trainer.model, trainer.optimizer, microbatches, lr, settings, trainer.diverged)
        epsilon = privacy.epsilon(step + 1)
        more = {"clipped": round(result.clipped, 4), "epsilon": epsilon if math.isfinite(epsilon) else None}
        return StepResult(result.loss, result.norm, sum(b.tokens.size for b in batches), more)


class Preferences:
    """The DPO loss of pairs of answers, with the margin and how often the chosen answer is the more likely one."""

    def step(self, trainer: Trainer, lr: float) -> StepResult:
        source, margins = trainer.source, list[float]()
        pairs = source.microbatches(trainer.state.step, *trainer.share_args)
        n_tokens = sum(pair.chosen.tokens.size + pair.rejected.tokens.size for pair in pairs)
        divisor, n_tokens = trainer.world.sum(len(pairs), n_tokens)

        def gradients(model: Model, pair: SeededPair, divisor: float, on_gradient: Any, on_loss: Any) -> Any:
            result = pair_gradients(model, pair, source.beta, source.label_smoothing, divisor, on_gradient)
            margins.append(result.margin)
            return result

        seeds = [(trainer.dropout_seed(2 * i), trainer.dropout_seed(2 * i + 1)) for i in range(len(pairs))]
        settings = lr, trainer.options.clip, trainer.diverged, trainer.accumulator, trainer.world
        seeded_pairs = list(map(SeededPair, pairs, seeds))
        loss, norm = accumulated_step(
            trainer.model, trainer.optimizer, seeded_pairs, divisor, *settings, trainer.on_gradients(), gradients
        )
        total, right = trainer.world.sum(sum(margins), sum(margin > 0 for margin in margins))
        return StepResult(loss, norm, int(n_tokens), {"margin": total / divisor, "accuracy": right / divisor})

    def validate(self, trainer: Trainer) -> Sums:
        """The summed loss, the number, margins and right preferences of this rank's pairs, and the first answer."""
        source = trainer.source
        pairs = source.validation(*trainer.share_args)
        results = [pair_loss(trainer.model, pair, source.beta, source.label_smoothing) for pair in pairs]
        margins = [result.margin for result in results]
        others = {"margin": sum(margins), "accuracy": float(sum(margin > 0 for margin in margins))}
        return Sums(sum(r.loss for r in results), len(results), pairs[0].chosen if pairs else None, others)

    def describe(self, means: dict[str, float]) -> str:
        """The margin and the accuracy, in words."""
        return f"  margin {means['margin']:.4f}  accuracy {means['accuracy']:.0%}"


Objective = CrossEntropy | Preferences


def objective_of(trainer: Trainer) -> Objective:
    """The objective that the trainer's data and options ask for."""
    if isinstance(trainer.source, PreferenceSource):
        return Preferences()
    return CrossEntropy() if trainer.privacy is None else PrivateCrossEntropy(trainer.privacy)


def seeded(trainer: Trainer, batches: list[Batch]) -> list[Microbatch]:
    """The batches of the present step, with their dropout seeds."""
    return [Microbatch(*batch, trainer.dropout_seed(i)) for i, batch in enumerate(batches)]
