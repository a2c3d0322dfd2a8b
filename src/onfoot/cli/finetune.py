"""`onfoot finetune`: LoRA or full fine-tuning on prompts and completions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.cli.config_file import Config, PrintConfig, show_config, with_config
from onfoot.cli.console import show_text
from onfoot.cli.fields import options_from, reject_with, reject_without
from onfoot.cli.options import Download, Threads, download_model
from onfoot.cli.train import (
    FindLr,
    check_engine_values,
    next_run_folder,
    private_values,
    resume_run,
    show_lr_range,
    starting,
    train_and_report,
)
from onfoot.train.options import FinetuneOptions
from onfoot.train.parallel import launched

LORA_OPTIONS = ("r", "alpha", "targets", "lora_dropout", "use_rslora", "lora_plus")
DPO_OPTIONS = ("dpo_beta", "dpo_smoothing")
PEFT_NAMES = {  # additional PEFT-style spellings; messages show the first
    "r": ("--r", "--lora-rank", "-r"),
    "alpha": ("--alpha", "--lora-alpha"),
    "targets": ("--targets", "--target-modules"),
}


@options_from(FinetuneOptions, exclude={"model", "data", "validation_data", "changes"}, names=PEFT_NAMES)
def finetune(
    context_: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or run folder.", show_default=False)] = "",
    data: Annotated[
        list[Path] | None, typer.Option(help="A file, folder or saved dataset; repeat for several.", show_default=False)
    ] = None,
    validation_data: Annotated[
        list[Path] | None,
        typer.Option(help="A file for validation, instead of a split of --data.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default a new one in runs/.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Run folder to resume; --steps, --lr and others may change.", show_default=False)
    ] = None,
    config: Config = None,
    print_config: PrintConfig = False,
    find_lr: FindLr = False,
    threads: Threads = None,
    download: Download = False,
    **values: Any,
) -> None:
    """Fine-tune a model on prompts and completions: LoRA layers by default, all weights with --full.

    The data is a .jsonl, .json, .csv or .parquet file, or a dataset saved by Hugging Face's library, whose records are
    {"messages"}, {"prompt", "completion"}, {"instruction", "input", "output"}, {"conversations"} or {"text"}; with
    --dpo, {"prompt", "chosen", "rejected"}.
    """
    if resume is not None:
        reject_with(context_, "--resume", ("find_lr",), "a range test begins with the first step")
        from onfoot.train import finetune as runs

        resume_run(context_, resume, runs.resume)
        return
    paths = {"data": [str(p) for p in data or []], "validation_data": [str(p) for p in validation_data or []]}
    values = with_config(context_, config, FinetuneOptions, {"model": model, **paths, **values})
    if not values["model"]:
        raise ValueError("no model: give one, as in onfoot finetune MODEL --data FILE.jsonl")
    if values["full"]:
        reject_with(context_, "--full", LORA_OPTIONS, "full fine-tuning has no LoRA layers")
    if values["dpo"]:
        reject_with(context_, "--dpo", ("pack", "row_length"), "each answer of a pair is a row of its own")
    else:
        reject_without(context_, "--dpo", DPO_OPTIONS)
    if values["steps"]:
        reject_with(context_, "--steps", ("epochs",), "both set the length of the run")
    if values["validation_data"]:
        reject_with(context_, "--validation-data", ("validation",), "both choose the validation data")
    check_engine_values(values)
    private_values(context_, values)
    options = FinetuneOptions(**values)
    if print_config:
        show_config(options)
        return
    if download:
        download_model(options.model)
    if not options.quiet and launched()[0] == 0:  # before the imports, which take as long as all that was done so far
        show_text(f"fine-tuning {options.model} on {', '.join(options.data)}", "dim")
    from onfoot.train import finetune as runs

    if find_lr:
        show_lr_range(context_, options, runs.make_trainer)
        return
    with starting(options.quiet):
        trainer = runs.start(out or next_run_folder(Path("runs"), "finetune"), options)
    train_and_report(trainer)
