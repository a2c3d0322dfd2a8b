"""`onfoot finetune`: LoRA, or all weights, on prompts and completions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.cli.fields import options_from, refuse_beside
from onfoot.cli.options import Threads
from onfoot.cli.train import finish, next_free, resume_run
from onfoot.train.options import FinetuneOptions

LORA_OPTIONS = ("r", "alpha", "targets", "lora_dropout", "use_rslora")


@options_from(FinetuneOptions, leave_out={"model", "data", "validation_data"})
def finetune(
    context_: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, or the folder of a run.", show_default=False)
    ] = "",
    data: Annotated[
        list[Path] | None, typer.Option(help="A .jsonl file; several times for several.", show_default=False)
    ] = None,
    validation_data: Annotated[
        list[Path] | None, typer.Option(help="A .jsonl file to validate on, instead of a share.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default a new one below runs/.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to go on with, as it was begun.", show_default=False)
    ] = None,
    threads: Threads = None,
    **values: Any,
) -> None:
    """Fine-tune a model on prompts and completions: LoRA layers by default, all weights with --full.

    A line of the data is {"prompt", "completion"}, {"instruction", "input", "output"} or {"messages"}.
    """
    from onfoot.train import finetune as runs

    if resume is not None:
        resume_run(context_, resume, runs.resume)
        return
    if not model:
        raise ValueError("a model is needed: onfoot finetune MODEL --data FILE.jsonl")
    if values["full"]:
        refuse_beside(context_, "--full", LORA_OPTIONS, "all weights train, and there are no LoRA layers")
    if values["steps"]:
        refuse_beside(context_, "--steps", ("epochs",), "each says how long the run is")
    if validation_data:
        refuse_beside(context_, "--validation-data", ("validation",), "each says what is validated on")
    options = FinetuneOptions(
        model=model,
        data=[str(p) for p in data or []],
        validation_data=[str(p) for p in validation_data or []],
        **values,
    )
    trainer = runs.start(out or next_free(Path("runs"), "finetune"), options)
    finish(trainer)
