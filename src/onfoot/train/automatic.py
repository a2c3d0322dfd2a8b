"""Settings of a fine-tune that are chosen from the data's size: rows, batch, passes and learning rate.

A small set must still give enough optimizer steps, so a step has few examples when there are few, and there are more
passes over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from onfoot.data.packing import Rows
from onfoot.data.preference_source import PreferenceSource
from onfoot.data.sft import SftSource
from onfoot.models.model import Model
from onfoot.train.dpo import set_reference
from onfoot.train.given import check_options
from onfoot.train.options import FinetuneOptions, TrainingOptions
from onfoot.train.sources import as_source

MIN_STEPS = 100  # optimizer steps that a fine-tune gets at least, unless that takes more than MAX_EPOCHS passes
MIN_EPOCHS, MAX_EPOCHS = 3, 20
STEPS_PER_EPOCH = 32  # the aim, within the limits of the examples per step
FEWEST, MOST = 4, 32  # examples per step
ROWS = 4  # per step, if the examples are short: several of them share a row
BATCH_TOKENS = 4096  # per microbatch; more rows are accumulated
PAIRS_RATE = 2e-4  # the learning rate of preference tuning
LONG_RUN = 1000  # steps; in a longer run the rate falls with the square root of its length


def settle(data: Any, model: Model, options: TrainingOptions | None) -> tuple[TrainingOptions, Any]:
    """The options and the source of a trainer; for examples, what is left open is chosen as `onfoot finetune` does.

    Everything is left open without options, and with `FinetuneOptions` each setting that is 0. The reference of
    preference pairs is the model without its adapter; without one, the model as it is now.
    """
    check_options(options, model, reads=not hasattr(data, "microbatches"))
    if isinstance(options, FinetuneOptions) and options.dpo and not hasattr(data, "microbatches"):
        options = for_pairs(replace(options, full=model.active_adapter is None))
        pairs: PreferenceSource = as_source(data, model, options)
        set_reference(model, pairs)
        return replace(options, steps=options.steps or pairs.steps_for(options.epochs)), pairs
    source = as_source(data, model, options or TrainingOptions())
    if options is None:
        made_here = isinstance(source, SftSource) and source is not data
        options = FinetuneOptions() if made_here else TrainingOptions()
    if not isinstance(options, FinetuneOptions):
        return options, source
    if isinstance(source, SftSource) and source is not data:
        return choose(replace(options, full=model.active_adapter is None), source, model.config.n_embd)
    if options.dpo and not isinstance(source, PreferenceSource):
        raise ValueError(f"dpo=True needs preference pairs, but {type(source).__name__} is not a PreferenceSource")
    if not (options.steps and options.lr):
        raise ValueError(
            f"steps={options.steps} and lr={options.lr:g}: 0 is chosen from the number of examples, which this data "
            f"does not have; give both"
        )
    return options, source


def choose(options: FinetuneOptions, source: SftSource, width: int) -> tuple[FinetuneOptions, SftSource]:
    """The options with a value for each that is 0, and the source with such rows; `width` is the model's."""
    private, n = options.dp_clip is not None, source.n_examples
    train, held_out = source.train.examples, source.held_out.examples
    lengths, limit = np.concatenate([source.train.lengths, source.held_out.lengths]), source.train.max_length
    length = min(options.row_length or (limit if private else row_length(lengths, limit, options.batch_size)), limit)
    if options.pack and length < limit:
        packed = [Rows(part, length, options.seed, True) for part in (train, held_out)]
        source = replace(source, train=packed[0], held_out=packed[1])
    rows = n if private else source.rows
    batch = batching(n, rows, source.train.width, options.batch_size, options.accumulate)
    source = replace(source, **batch._asdict())
    per_step = batch.batch_size * batch.accumulate
    made = min(options.steps * per_step / rows, 1e6)
    epochs = options.epochs or made or epochs_for(rows / per_step)
    steps = options.steps or source.steps_for(epochs, private)
    lr = options.lr or rate_for(width, steps, options.full)
    return replace(options, **batch._asdict(), row_length=length, epochs=epochs, steps=steps, lr=lr), source


def for_pairs(options: FinetuneOptions) -> FinetuneOptions:
    """The options of a fine-tune on preference pairs, with a value for each that is 0."""
    return replace(
        options,
        batch_size=options.batch_size or FEWEST,
        accumulate=options.accumulate or 1,
        epochs=options.epochs or float(MIN_EPOCHS),
        lr=options.lr or PAIRS_RATE,
    )


def examples_per_step(n: int) -> int:
    """The number of examples per optimizer step for n training examples."""
    return min(n, max(FEWEST, min(MOST, n // STEPS_PER_EPOCH)))


def row_length(lengths: Sequence[int] | np.ndarray, max_length: int, batch_size: int = 0) -> int:
    """Tokens per packed row, so that `batch_size` rows (4 if it is 0) have the examples of one step."""
    mean = int(np.sum(lengths)) / len(lengths)
    wanted = math.ceil(examples_per_step(len(lengths)) * mean / (batch_size or ROWS))
    return min(max_length, max(wanted, int(np.max(lengths))))


class Batching(NamedTuple):
    batch_size: int
    accumulate: int


def batching(n_examples: int, n_rows: int, width: int, batch_size: int = 0, accumulate: int = 0) -> Batching:
    """Rows per microbatch and microbatches per step, so that a step has `examples_per_step` examples."""
    if batch_size:
        return Batching(batch_size, accumulate or 1)
    rows = max(1, round(n_rows * examples_per_step(n_examples) / n_examples))
    pieces = accumulate or math.ceil(rows / max(1, BATCH_TOKENS // width))
    return Batching(math.ceil(rows / pieces), pieces)


def epochs_for(steps_per_epoch: float) -> float:
    """The number of passes that gives at least 100 steps, between 3 and 20."""
    return float(min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(MIN_STEPS / steps_per_epoch))))


def rate_for(width: int, steps: int, full: bool) -> float:
    """The peak learning rate of a fine-tune: lower for wide models and long runs, a tenth for all weights."""
    lora = 3e-4 * (2048 / width) ** 0.75 * min(1.0, math.sqrt(LONG_RUN / steps))
    return float(f"{lora / 10 if full else lora:.1e}")
