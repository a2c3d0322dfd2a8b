"""`onfoot finetune`: trains LoRA layers, or all weights, on prompts and completions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from onfoot.data.batches import place
from onfoot.data.sft import load_source
from onfoot.formats.peft import restore_adapter
from onfoot.generate.chat import template_of
from onfoot.models.model import Model, load
from onfoot.train import automatic, runs
from onfoot.train.fingerprint import fingerprint, record_or_verify
from onfoot.train.loop import Trainer, set_dropout
from onfoot.train.options import FinetuneOptions
from onfoot.train.progress import logger

DEFAULT_MAX_LENGTH = 1024  # tokens per row, unless the model allows fewer


def start(run: Path, options: FinetuneOptions) -> Trainer:
    """Starts a run in a new folder."""
    return runs.create(run, options, build)


def resume(run: Path, **changes: Any) -> tuple[Trainer, list[str]]:
    """The trainer of a run at its newest valid checkpoint, with changed options, and warnings."""
    return runs.resume(run, FinetuneOptions, build, changes)


def build(run: Path, options: FinetuneOptions, checkpoint: Path | None) -> Trainer:
    """The trainer of a run, restored from a checkpoint, or at step 0."""
    trainer = make_trainer(run, options, checkpoint)
    trainer.restore(checkpoint)
    return trainer


def make_trainer(run: Path, options: FinetuneOptions, checkpoint: Path | None) -> Trainer:
    """The trainer of a run with the weights of a checkpoint, or of step 0; its state and log are not restored."""
    base = checkpoint if checkpoint is not None and options.full else options.model
    logger.info("loading %s", base)
    model = load(base, options.dtype, options.engine, quantized=options.quantized)
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; put tokenizer.json next to its config.json")
    if model.active_adapter is not None:
        raise ValueError(f"{options.model} is an adapter; merge it into its base model first with: onfoot merge")
    if base == options.model:
        record_or_verify(run / "base.json", fingerprint(model), f"the model {options.model}")
    set_dropout(model, options.dropout)
    template = template_of(model)
    if template.is_fallback:
        options = replace(options, template=False)
    logger.info("reading and tokenizing %s", ", ".join(options.data))
    source = load_source(
        options.data,
        model.tokenizer,
        template,
        max_length=row_length(model, options),
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        eval_rows=options.eval_windows,
        on_long=options.on_long,
        pack=options.pack,
        validation=options.validation,
        validation_files=options.validation_data,
        seed=options.seed,
        begin=place([(step, o.batch_size * o.accumulate) for step, o in options.phases()]),
        templated=options.template,
    )
    options, source = automatic.choose(options, source, model.config.n_embd)
    record_or_verify(run / "data.json", source.fingerprint(), f"the data of {run}")
    if not options.full:
        add_lora_layers(model, options)
        if checkpoint is not None:
            restore_adapter(model, checkpoint)

    def write(folder: Path) -> None:
        if not options.full:
            model.save_adapter(folder)
            return
        model.save(folder)
        if source.question() or not template.is_fallback:
            template.save(folder)  # the saved model must format conversations as in training

    return Trainer(model, source, options, out=run, write=write)


def add_lora_layers(model: Model, options: FinetuneOptions) -> None:
    """Adds the LoRA adapter of the options."""
    targets = [target.strip() for target in options.targets.split(",") if target.strip()]
    model.add_lora(
        options.r,
        options.alpha,
        targets or None,
        dropout=options.lora_dropout,
        use_rslora=options.use_rslora,
        seed=options.seed,
    )


def row_length(model: Model, options: FinetuneOptions) -> int:
    """The maximum tokens per row: options.max_length, by default what the model allows, up to 1024."""
    limit = model.config.n_positions
    if options.max_length > limit:
        raise ValueError(f"max_length={options.max_length} exceeds n_positions={limit} of {options.model}")
    return options.max_length or min(limit, DEFAULT_MAX_LENGTH)
