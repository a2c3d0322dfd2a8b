"""`onfoot train`: a model from text files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from onfoot.cli.console import show_text
from onfoot.cli.fields import given, options_from
from onfoot.train.options import TrainOptions


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
    **values: Any,
) -> None:
    """Train a GPT on text files. Without any, on the Python language reference that every Python carries."""
    from onfoot.train import pretrain

    if resume is not None:
        others = [name for name in given(context_) if name != "resume"]
        if others:
            raise ValueError(
                f"--resume goes on with the options that the run was begun with; leave out {', '.join(others)}"
            )
        trainer, complaints = pretrain.resume(resume)
        for complaint in complaints:
            show_text(complaint, "yellow")
        if trainer.state.step >= trainer.options.steps:
            show_text(f"{resume} is complete: all {trainer.options.steps} steps are done")
            return
        show_text(f"resuming {resume} at step {trainer.state.step}")
    else:
        options = TrainOptions(texts=[str(p) for p in texts or []], **values)
        trainer = pretrain.start(out or next_free(Path("runs"), "train"), options)
    announce(trainer)
    finish(trainer)


def next_free(parent: Path, name: str) -> Path:
    """parent/name-001, or the first number after it that is not taken."""
    return next(p for i in range(1, 10**6) if not (p := parent / f"{name}-{i:03d}").exists())


def announce(trainer: Any) -> None:
    model, options, source = trainer.model, trainer.options, trainer.source
    train_tokens, held_out = len(source.train.tokens), len(source.held_out.tokens)
    a_step = options.batch_size * options.accumulate * options.context
    show_text(
        f"{model.n_params:,} parameters ({model.config.n_layer} blocks, width {model.config.n_embd}), "
        f"{train_tokens:,} tokens to train on, {held_out:,} to validate on\n"
        f"{options.steps:,} steps of {a_step:,} tokens: {options.steps * a_step / train_tokens:.1f} epochs; "
        f"{model.dtype}, engine {model.engine.name}; run folder {trainer.run}"
    )


def finish(trainer: Any) -> None:
    """Trains, and says what came of it and what can be done next."""
    outcome = trainer.train()
    if outcome.interrupted:
        show_text(f"\nstopped and saved at step {outcome.state.step}; go on with: onfoot train --resume {trainer.run}")
        raise typer.Exit(130)
    loss = outcome.validation_loss
    show_text(f"\nvalidation loss {loss:.4f} nats a token (perplexity {math.exp(loss):.2f})")
    if trainer.bigram is not None:
        below = trainer.bigram - loss
        word = f"{below:.2f} below" if below > 0 else f"{-below:.2f} above"
        show_text(f"the bigram entropy of this text is {trainer.bigram:.4f}: the model is {word} it")
    sample = trainer.sample()
    if sample is not None:
        show_text("\na sample:\n  " + sample.replace("\n", "\n  "))
    show_text(
        f"\nmodel   {trainer.run / 'best'}  (opens in transformers, too)\ncurve   {trainer.run / 'loss.png'}\n"
        f'next    onfoot generate {trainer.run} --prompt "The " --max-new-tokens 200 --slide'
    )
