"""`onfoot finetune`: LoRA companions, or all weights, on prompts and completions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from onfoot.models.model import Model, load
from onfoot.train import runs
from onfoot.train.chat import ChatTemplate
from onfoot.train.loop import Trainer
from onfoot.train.options import FinetuneOptions
from onfoot.train.sft import load_source

LONGEST = 1024  # the default length of a row, where the model allows more


def start(run: Path, options: FinetuneOptions) -> Trainer:
    """A run in a new folder."""
    return runs.begin(run, options, build)


def resume(run: Path) -> tuple[Trainer, list[str]]:
    """A run where its newest sound checkpoint left it, and what is to be said about unsound ones."""
    return runs.resume(run, FinetuneOptions, build)


def build(run: Path, options: FinetuneOptions, checkpoint: Path | None) -> Trainer:
    """The trainer of a run, at a checkpoint or at the beginning."""
    base = checkpoint if checkpoint is not None and options.full else options.model
    model = load(base, options.dtype, options.engine)
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; put its tokenizer.json beside its config.json")
    source = load_source(
        options.data,
        model.tokenizer,
        ChatTemplate.find(model.source or options.model),
        max_length=row_length(model, options),
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        eval_rows=options.eval_windows,
        on_long=options.on_long,
        pack=options.pack,
        validation=options.validation,
        validation_files=options.validation_data,
        seed=options.seed,
    )
    if options.steps == 0:
        options = replace(options, steps=source.steps_for(options.epochs))
    if not options.full:
        if checkpoint is not None:
            model.load_adapter(checkpoint)
        else:
            add_companions(model, options)
    trainer = Trainer(run, options, model, source, model.save if options.full else model.save_adapter)
    trainer.restore(checkpoint)
    return trainer


def add_companions(model: Model, options: FinetuneOptions) -> None:
    """The adapter that the options ask for."""
    chosen = [target.strip() for target in options.targets.split(",") if target.strip()]
    model.add_lora(
        options.r,
        options.alpha,
        chosen or block_targets(model),
        dropout=options.lora_dropout,
        rank_stabilised=options.rank_stabilised,
        seed=options.seed,
    )


def block_targets(model: Model) -> list[str]:
    """All linear layers of the blocks, by the ends of their names: what LoRA stands beside by default."""
    inside = (name for name, value in model.params.items() if value.ndim == 2 and re.search(r"\.\d+\.", name))
    return sorted({name.split(".")[-2] for name in inside})


def row_length(model: Model, options: FinetuneOptions) -> int:
    """The length of a row: what was asked for, or what the model allows up to a limit."""
    limit = model.config.n_positions
    if options.max_length > limit:
        raise ValueError(f"max_length={options.max_length} exceeds n_positions={limit} of {options.model}")
    return options.max_length or min(limit, LONGEST)
