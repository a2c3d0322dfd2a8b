"""The batches that a run asks its source for. Those of a user's own source are checked, and its failures named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.data.batches import Batch
from onfoot.formats.files import shown
from onfoot.models.model import Model
from onfoot.models.step import checked_batch
from onfoot.train.sources import OwnSource

if TYPE_CHECKING:
    from onfoot.train.loop import Trainer


def is_users_source(source: Any) -> bool:
    """Whether a source is the user's, and not one of ours."""
    return isinstance(source, OwnSource) or not type(source).__module__.startswith("onfoot.")


def naming_source(trainer: Trainer, method: str) -> AbstractContextManager[None]:
    """Where a method of the source is called: if a user's own source fails, the error names it."""
    source = trainer.source
    if not is_users_source(source):
        return nullcontext()
    return trainer.saved_if_it_fails(f"{type(getattr(source, 'own', source)).__name__}.{method}")


def batches_of_step(trainer: Trainer) -> list[Batch]:
    """The batches of the next step."""
    with naming_source(trainer, "microbatches"):
        return _batches(trainer, trainer.source.microbatches(trainer.state.step, *trainer.share_args))


def batches_of_examples(trainer: Trainer, examples: np.ndarray) -> list[Batch]:
    """The batches of the examples of these numbers."""
    with naming_source(trainer, "batches_of"):
        return _batches(trainer, trainer.source.batches_of(examples), least=0)


def validation_batches(trainer: Trainer) -> Iterator[Batch]:
    """The validation batches, one at a time."""
    with naming_source(trainer, "validation"):
        for one in trainer.source.validation(*trainer.share_args):
            yield as_batch(one, trainer.model) if is_users_source(trainer.source) else Batch(*one)


def _batches(trainer: Trainer, found: Any, least: int = 1) -> list[Batch]:
    if not is_users_source(trainer.source):
        return [Batch(*batch) for batch in found]
    if not isinstance(found, list | tuple) or len(found) < least:
        raise ValueError(f"it must return a list of batches (tokens, targets), got {shown(found)}")
    return [as_batch(one, trainer.model) for one in found]


def as_batch(given: Any, model: Model) -> Batch:
    """A batch of NumPy arrays that the model takes; PyTorch tensors and lists of lists are converted."""
    if not isinstance(given, list | tuple) or not 2 <= len(given) <= 3:
        raise ValueError(f"a batch must be (tokens, targets) or (tokens, targets, segments), got {shown(given)}")
    batch = Batch(*(None if part is None else np.asarray(part) for part in given))  # type: ignore[arg-type]
    for name, x in batch._asdict().items():
        if name != "segments" and (x is None or x.dtype.kind not in "iu" or x.ndim != 2):
            kind = "nothing" if x is None else f"{x.dtype} {x.shape}"
            raise ValueError(f"the {name} of a batch must be integers (B, T), got {kind}")
    checked_batch(model, batch.tokens, batch.targets, 1.0, batch.segments)
    return batch
