"""`onfoot finetune`: LoRA layers, or all weights, on prompts and completions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onfoot.data.sft import load_source
from onfoot.formats.peft import restore_adapter
from onfoot.generate.chat import template_of
from onfoot.models.model import Model, load
from onfoot.train import runs
from onfoot.train.fingerprint import fingerprint, remember
from onfoot.train.loop import Trainer, set_dropout
from onfoot.train.options import FinetuneOptions

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
    model = load(base, options.dtype, options.engine, quantized=options.quantized)
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; put its tokenizer.json beside its config.json")
    if model.active_adapter is not None:
        raise ValueError(f"{options.model} is an adapter; make it one with its base first: onfoot merge")
    if base == options.model:
        remember(run / "base.json", fingerprint(model), f"the model {options.model}")
    set_dropout(model, options.dropout)
    template = template_of(model)
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
    )
    remember(run / "data.json", source.fingerprint(), f"the data of {run}")
    if options.steps == 0:
        options = replace(options, steps=source.steps_for(options.epochs))
    if not options.full:
        add_lora_layers(model, options)
        if checkpoint is not None:
            restore_adapter(model, checkpoint)

    def write(folder: Path) -> None:
        if not options.full:
            model.save_adapter(folder)
            return
        model.save(folder)
        template.save(folder)  # a resumed run, and whoever opens the model, must write conversations alike

    trainer = Trainer(run, options, model, source, write)
    trainer.restore(checkpoint)
    return trainer


def add_lora_layers(model: Model, options: FinetuneOptions) -> None:
    """The adapter that the options ask for."""
    chosen = [target.strip() for target in options.targets.split(",") if target.strip()]
    model.add_lora(
        options.r,
        options.alpha,
        chosen or None,
        dropout=options.lora_dropout,
        use_rslora=options.use_rslora,
        seed=options.seed,
    )


def row_length(model: Model, options: FinetuneOptions) -> int:
    """The length of a row: what was asked for, or what the model allows up to a limit."""
    limit = model.config.n_positions
    if options.max_length > limit:
        raise ValueError(f"max_length={options.max_length} exceeds n_positions={limit} of {options.model}")
    return options.max_length or min(limit, LONGEST)
