"""`onfoot finetune`: trains LoRA layers, or all weights, on prompts and completions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.data import corpus
from onfoot.data.batches import Place, place
from onfoot.data.count import Count
from onfoot.data.example_file import StoredPairs
from onfoot.data.preference_source import PreferenceSource, fit_pairs, split_pairs
from onfoot.data.preferences import read_preferences
from onfoot.data.records import READERS, ReadLog
from onfoot.data.sft import SftSource, load_source
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.files import read_json
from onfoot.formats.peft import restore_adapter
from onfoot.formats.write import write_json
from onfoot.generate.chat import template_of
from onfoot.models.load import load
from onfoot.models.model import Model
from onfoot.train import automatic, runs
from onfoot.train.dpo import set_reference
from onfoot.train.fingerprint import fingerprint, record_or_verify
from onfoot.train.loop import Trainer, set_dropout
from onfoot.train.options import FinetuneOptions
from onfoot.train.parallel import world
from onfoot.train.rates import freeze
from onfoot.train.sources import preference_source, row_length
from onfoot.train.start import announce

REFERENCE = "reference.json"  # the reference log-probabilities of preference pairs


def start(run: Path, options: FinetuneOptions) -> Trainer:
    """Starts a run in a new folder."""
    return runs.create(run, options, build)


def check(options: FinetuneOptions) -> None:
    """Raises ValueError for options that can be checked before any work is done."""
    if not options.data:
        raise ValueError("no data: pass --data FILE (.jsonl, .json, .csv, .parquet or a saved dataset)")
    corpus.find_texts([Path(name) for name in (*options.data, *options.validation_data)], tuple(READERS))


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
    check(options)
    base = checkpoint if checkpoint is not None and options.full else options.model
    announce(f"loading {base}")
    dtype = "float32" if options.full and options.dtype == "auto" else options.dtype  # 16-bit weights are frozen
    model = load(base, dtype, options.engine, quantized=options.quantized)
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer; put tokenizer.json next to its config.json")
    if model.active_adapter is not None:
        raise ValueError(f"{options.model} is an adapter; merge it into its base model first with: onfoot merge")
    if base == options.model:
        announce(f"computing the fingerprint of {base}")
        record_or_verify(run / "base.json", fingerprint(model), f"the model {options.model}")
    set_dropout(model, options.dropout)
    if options.full:
        freeze(model, options.frozen)  # the trainer does so again: a wrong name is found before the data is read
    else:
        add_lora_layers(model, options)
    template = template_of(model)
    if template.is_fallback:
        options = replace(options, template=False)
    count = Count("pairs" if options.dpo else "examples")
    announce(f"reading and tokenizing {', '.join(options.data)}", count)
    source: Any
    if options.dpo:
        options = automatic.for_pairs(options)
        source = preferences(run, model, options, template, count)
        options = options if options.steps else replace(options, steps=source.steps_for(options.epochs))
    else:
        found = examples(run, model, options, template, count)
        options, source = automatic.choose(options, found, model.config.n_embd)
    record_or_verify(run / "data.json", source.fingerprint(), f"the data of {run}")
    if options.dpo:
        find_reference(run, options, source, model if base == options.model else None)
    if not options.full and checkpoint is not None:
        restore_adapter(model, checkpoint)

    def write(folder: Path) -> None:
        if options.full:
            model.save(folder)
        else:
            model.save_adapter(folder)
        if not template.is_fallback or options.dpo or source.question():
            template.save(folder)  # the saved model must format conversations as in training

    return Trainer(model, source, options, out=run, write=write)


def examples(
    run: Path, model: Model, options: FinetuneOptions, template: ChatTemplate, count: Count | None = None
) -> SftSource:
    """The source of prompts and completions."""
    assert model.tokenizer is not None
    return load_source(
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
        begin=first_row(options),
        skip_bad=options.skip_bad,
        templated=options.template,
        folder=run,
        count=count,
    )


def preferences(
    run: Path, model: Model, options: FinetuneOptions, template: ChatTemplate, count: Count | None = None
) -> PreferenceSource:
    """The source of pairs, without their reference log-probabilities."""
    tokenizer, length = model.tokenizer, row_length(model, options)
    assert tokenizer is not None

    def read(files: list[str]) -> tuple[StoredPairs, str]:
        log = ReadLog(options.skip_bad, count)
        pairs = read_preferences([Path(f) for f in files], tokenizer, template, log, run)
        kept, about = fit_pairs(pairs, length, options.on_long)
        return kept, f"{about}\n{log.bad_report()}" if log.bad_report() else about

    train, about = read(options.data)
    if options.validation_data:
        held_out, more = read(options.validation_data)
        about = f"{about}\nvalidation: {more}"
    else:
        train, held_out = split_pairs(train, options.validation, options.seed)
    return preference_source(train, held_out, options, about, first_row(options))


def find_reference(run: Path, options: FinetuneOptions, source: PreferenceSource, base: Model | None) -> None:
    """Sets the reference log-probabilities: those of the base model, computed once and kept in the run folder."""
    path, ranks = run / REFERENCE, world()
    depends_on = [read_json(run / "base.json")["sha256"], source.fingerprint()]
    n = len(source.train), len(source.held_out)

    def compute() -> None:
        count = Count("answers", 2 * sum(n))
        announce(f"computing the reference log-probabilities of {count.total:,} answers", count)
        model = base
        if model is None:  # the run trains all weights, and has the checkpoint's
            model = load(options.model, options.dtype, options.engine)
            record_or_verify(run / "base.json", fingerprint(model), f"the model {options.model}")
        set_reference(model, source, count)
        rows = [*source.train.reference.tolist(), *source.held_out.reference.tolist()]
        write_json(path, {"of": depends_on, "log_probs": rows})

    def read() -> None:
        values = read_json(path)
        table = np.array(values.get("log_probs"), dtype=object)
        if values.get("of") != depends_on or table.shape != (sum(n), 2):
            raise ValueError(f"{path} belongs to another base model or to other data; remove it, and it is made anew")
        source.train.reference, source.held_out.reference = np.split(table.astype(np.float64), [n[0]])

    ranks.rank0_first(read if path.is_file() else compute, lambda: (ranks.wait_for_path(path), read())[1])  # type: ignore[func-returns-value]


def first_row(options: FinetuneOptions) -> Place:
    """Where the rows of the next step begin, after changes of the number of rows per step."""
    return place([(step, o.batch_size * o.accumulate) for step, o in options.phases()])


def add_lora_layers(model: Model, options: FinetuneOptions) -> None:
    """Adds the LoRA adapter of the options."""
    model.add_lora(
        options.r,
        options.alpha,
        options.target_list or None,
        dropout=options.lora_dropout,
        use_rslora=options.use_rslora,
        seed=options.seed,
    )
