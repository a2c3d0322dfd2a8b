"""What a run minimizes, and one step of it: cross-entropy, that of private steps, or the loss of preference pairs.

An objective makes the steps and measures the validation data of a `Trainer`, which does everything around that. The
trainer is an argument and not an attribute: without a cycle of references, a trainer that nobody holds any more is
freed at once, and with it the lock on its run.
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
from onfoot.train.source_batches import (
    batches_of_examples,
    batches_of_step,
    naming_source,
    validation_batches,
)
from onfoot.train.step import Microbatch, accumulated_step, fused_step

if TYPE_CHECKING:
    from onfoot.models.model import Model
    from onfoot.train.loop import Trainer


class StepResult(NamedTuple):
    """The result of one optimizer step."""

    loss: float  # nats per target, or per pair
    grad_norm: float  # before clipping
    n_tokens: int  # of all ranks
    more: dict[str, Any]  # what else the log records


class ValidationSums(NamedTuple):
    """The validation data of one rank, summed: the ranks' sums are added, then divided by `n`."""

    loss: float
    n: int  # the number of targets, or of pairs
    first: Batch | None
    others: dict[str, float]  # sums of further figures, by name


class CrossEntropy:
    """The mean cross-entropy of the targets."""

    def step(self, trainer: Trainer, lr: float) -> StepResult:
        batches = batches_of_step(trainer)
        n_targets = sum(int((b.targets != IGNORE).sum()) for b in batches)
        divisor, n_tokens = trainer.world.sum(n_targets, sum(b.tokens.size for b in batches))  # over all ranks
        if divisor == 0:
            where = f"step {trainer.state.step + 1}"
            with naming_source(trainer, "microbatches"):
                raise trainer.world.agreed(ValueError(f"{where}: all {n_tokens:.0f} targets are ignored ({IGNORE})"))
        microbatches = seeded_microbatches(trainer, batches)
        model, optimizer, on_gradients = trainer.model, trainer.optimizer, trainer.gradient_listener()
        if len(microbatches) == 1 and trainer.world.size == 1 and not trainer.options.clip and on_gradients is None:
            loss, norm = fused_step(model, optimizer, microbatches[0], int(divisor), lr, trainer.divergence_error)
        else:
            settings = lr, trainer.options.clip, trainer.divergence_error, trainer.accumulator, trainer.world
            loss, norm = accumulated_step(model, optimizer, microbatches, int(divisor), *settings, on_gradients)
        return StepResult(loss, norm, int(n_tokens), {})

    def validate(self, trainer: Trainer) -> ValidationSums:
        """The summed loss and the number of targets of this rank's validation batches, and the first of them."""
        total, n_targets = 0.0, 0
        first = None
        for batch in validation_batches(trainer):
            first = first or batch
            n = int((batch.targets != IGNORE).sum())
            loss = trainer.model.loss
            total += loss(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments) if n else 0.0
            n_targets += n
        return ValidationSums(total, n_targets, first, {})

    def figures(self, more: dict[str, Any]) -> dict[str, str]:
        """What the progress line shows beside the loss, of what `step` has returned as `more`."""
        return {}

    def describe(self, means: dict[str, float]) -> str:
        """The means beside the validation loss, in words."""
        return ""


class PrivateCrossEntropy(CrossEntropy):
    """Cross-entropy of a random sample of examples: each one's gradient is clipped, and noise is added to their sum."""

    def __init__(self, privacy: Privacy) -> None:
        self.privacy = privacy

    def step(self, trainer: Trainer, lr: float) -> StepResult:
        privacy, step = self.privacy, trainer.state.step
        batches = batches_of_examples(trainer, privacy.sample(step))
        settings = Settings(privacy.clip, privacy.noise, privacy.expected, privacy.seed, step)
        microbatches = seeded_microbatches(trainer, batches)
        result = private_step(trainer.model, trainer.optimizer, microbatches, lr, settings, trainer.divergence_error)
        epsilon = privacy.epsilon(step + 1)
        more = {"clipped": round(result.clipped, 4), "epsilon": epsilon if math.isfinite(epsilon) else None}
        return StepResult(result.loss, result.norm, sum(b.tokens.size for b in batches), more)

    def figures(self, more: dict[str, Any]) -> dict[str, str]:
        """How many examples were clipped, and the ε that is spent; without noise it is infinite."""
        epsilon = math.inf if more["epsilon"] is None else more["epsilon"]
        return {"clipped": f"{more['clipped']:.0%}", "ε": f"{epsilon:.3g}"}


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
        settings = lr, trainer.options.clip, trainer.divergence_error, trainer.accumulator, trainer.world
        seeded_pairs = list(map(SeededPair, pairs, seeds))
        loss, norm = accumulated_step(
            trainer.model, trainer.optimizer, seeded_pairs, divisor, *settings, trainer.gradient_listener(), gradients
        )
        total, right = trainer.world.sum(sum(margins), sum(margin > 0 for margin in margins))
        return StepResult(loss, norm, int(n_tokens), {"margin": total / divisor, "accuracy": right / divisor})

    def validate(self, trainer: Trainer) -> ValidationSums:
        """The summed loss, the number, margins and right preferences of this rank's pairs, and the first answer."""
        source = trainer.source
        pairs = source.validation(*trainer.share_args)
        results = [pair_loss(trainer.model, pair, source.beta, source.label_smoothing) for pair in pairs]
        margins = [result.margin for result in results]
        others = {"margin": sum(margins), "accuracy": float(sum(margin > 0 for margin in margins))}
        return ValidationSums(sum(r.loss for r in results), len(results), pairs[0].chosen if pairs else None, others)

    def figures(self, more: dict[str, Any]) -> dict[str, str]:
        """The margin."""
        return {"margin": f"{more['margin']:.3f}"}

    def describe(self, means: dict[str, float]) -> str:
        """The margin and the accuracy, in words."""
        return f"  margin {means['margin']:.4f}  accuracy {means['accuracy']:.0%}"


Objective = CrossEntropy | Preferences


def objective_of(source: Any, privacy: Privacy | None) -> Objective:
    """The objective that the data asks for, private if there is a plan for it."""
    if isinstance(source, PreferenceSource):
        return Preferences()
    return CrossEntropy() if privacy is None else PrivateCrossEntropy(privacy)


def seeded_microbatches(trainer: Trainer, batches: list[Batch]) -> list[Microbatch]:
    """The batches of the present step, with their dropout seeds."""
    return [Microbatch(*batch, trainer.dropout_seed(i)) for i, batch in enumerate(batches)]
