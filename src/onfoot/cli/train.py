"""`onfoot train`: a model from text files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onfoot.cli.console import show_text
from onfoot.cli.fields import given, options_from, refuse_beside
from onfoot.cli.options import Threads
from onfoot.train.options import TrainOptions

SIZES = ("n_layer", "n_head", "n_embd")

if TYPE_CHECKING:
    from onfoot.train.loop import Trainer


@options_from(TrainOptions, leave_out={"texts"})
def train(
    context_: typer.Context,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE…", help=".txt or .jsonl files, or folders of them.", show_default=False),
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
    """Train a GPT on text files. Without any, on the Python language reference that every Python carries."""
    from onfoot.train import pretrain

    if resume is not None:
        resume_run(context_, resume, pretrain.resume)
        return
    if values["init"] is not None:
        has = f"{values['init']} has its own sizes and its own tokenizer"
        refuse_beside(context_, "--init", (*SIZES, "tokenizer", "vocab_size"), has)
    if values["tokenizer"] != "bpe":
        only = "it is the size of a bpe that is trained on the spot"
        refuse_beside(context_, f"--tokenizer {values['tokenizer']}", ("vocab_size",), only)
    options = TrainOptions(texts=[str(p) for p in texts or []], **values)
    trainer = pretrain.start(out or next_free(Path("runs"), "train"), options)
    finish(trainer)


def next_free(parent: Path, name: str) -> Path:
    """parent/name-001, or the first number after it that is not taken."""
    return next(p for i in range(1, 10**6) if not (p := parent / f"{name}-{i:03d}").exists())


def resume_run(context: typer.Context, run: Path, resume: Callable[[Path], tuple[Trainer, list[str]]]) -> None:
    """Resumes a run with the options it was begun with."""
    others = [name for name in given(context) if name not in ("resume", "threads")]
    if others:
        raise ValueError(
            f"--resume goes on with the options that the run was begun with; leave out {', '.join(others)}"
        )
    trainer, complaints = resume(run)
    for complaint in complaints:
        show_text(complaint, "yellow")
    if trainer.state.step >= trainer.options.steps:
        trainer.train()  # what is left to do: a curve that was not drawn to its end
        show_text(f"{run} is complete: all {trainer.options.steps:,} steps are done")
        return
    show_text(f"resuming {run} at step {trainer.state.step:,}")
    finish(trainer)


def finish(trainer: Trainer) -> None:
    """Trains, and says what came of it and what can be done next."""
    model, options, run = trainer.model, trainer.options, trainer.run
    show_text(trainer.source.report())
    show_text(
        f"{model.n_trainable:,} of {model.n_params:,} parameters train; {model.dtype}, engine {model.engine.name}; "
        f"run folder {run}"
    )
    outcome = trainer.train()
    if outcome.interrupted:
        show_text(
            f"\nstopped and saved at step {outcome.state.step}; go on with: onfoot {options.command} --resume {run}"
        )
        raise typer.Exit(130)
    loss = outcome.validation_loss
    assert loss is not None  # the last step is always evaluated
    show_text(f"\nvalidation loss {loss:.4f} nats a token (perplexity {math.exp(min(loss, 700)):.2f})")
    if trainer.bigram is not None:
        below = trainer.bigram - loss
        word = f"{below:.2f} below" if below > 0 else f"{-below:.2f} above"
        show_text(f"the bigram entropy of this text is {trainer.bigram:.4f}: the model is {word} it")
    sample = trainer.sample()
    if sample is not None:
        show_text("\na sample:\n  " + sample.replace("\n", "\n  "))
    adapter = model.active_adapter is not None
    what, opens = ("adapter", "PEFT") if adapter else ("model  ", "transformers")
    show_text(
        f"\n{what} {run / 'best'}  (opens in {opens}, too)\ncurve   {run / 'loss.png'}\n"
        f"next    onfoot generate {shlex.quote(str(run))} {_prompt(trainer)}--max-new-tokens 200 --slide"
    )
    if adapter:
        show_text(f"        onfoot merge {shlex.quote(str(run))} --out {shlex.quote(str(run / 'merged'))}")


def _prompt(trainer: Trainer) -> str:
    """The beginning of the validation text as an option: what the model's own tokenizer surely knows."""
    prompt, tokenizer = trainer.source.prompt(), trainer.model.tokenizer
    words = tokenizer.decode(prompt.tolist()).split() if tokenizer is not None and prompt is not None else []
    return f"--prompt {shlex.quote(words[0])} " if words and words[0].isprintable() else ""
