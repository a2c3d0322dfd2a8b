"""`onfoot train`: trains a GPT on text files."""

from __future__ import annotations

import logging
import math
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onfoot.cli.config_file import Config, PrintConfig, show_config, with_config
from onfoot.cli.console import show_text
from onfoot.cli.fields import explicit_options, options_from, reject_with
from onfoot.cli.options import Threads
from onfoot.data.preference_source import PreferenceSource
from onfoot.own_engine import is_own
from onfoot.terminal import shell_word
from onfoot.train.options import RATES, TrainingOptions, TrainOptions
from onfoot.train.parallel import launched

FindLr = Annotated[
    bool,
    typer.Option(
        "--find-lr", help="Only test which learning rates train: the rate rises over 120 steps. Writes nothing."
    ),
]
PROMPT_TOKENS = 1000  # of the held-out text, in which the word is looked for
SIZES = ("n_layer", "n_head", "n_embd", "n_kv_head", "n_inner", "head_dim", "arch")

if TYPE_CHECKING:
    from onfoot.train.loop import Trainer
    from onfoot.train.start import Working


@options_from(TrainOptions, exclude={"texts", "changes"})
def train(
    context_: typer.Context,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE…",
            help='Text files, records with "text" (.jsonl, .csv, .parquet, saved datasets), folders; - is stdin.',
            show_default=False,
        ),
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
    **values: Any,
) -> None:
    """Train a GPT on text files, or, without files, on the language reference included with Python."""
    if resume is not None:
        reject_with(context_, "--resume", ("find_lr",), "a range test begins with the first step")
        from onfoot.train import pretrain

        resume_run(context_, resume, pretrain.resume)
        return
    values = with_config(context_, config, TrainOptions, {"texts": [str(p) for p in texts or []], **values})
    if values["init"] is not None:
        reason = f"{values['init']} has its own configuration and tokenizer"
        reject_with(context_, "--init", (*SIZES, "tokenizer", "vocab_size"), reason)
    if values["epochs"]:
        reject_with(context_, "--epochs", ("steps",), "both set the length of the run")
        if values["steps"] == TrainOptions.steps:  # not given
            values["steps"] = 0
    if values["tokenizer"] == "auto" and values["vocab_size"]:
        values["tokenizer"] = "bpe"
    if values["tokenizer"] != "bpe":
        reason = "it sets the vocabulary size of a new BPE tokenizer (--tokenizer bpe)"
        reject_with(context_, f"--tokenizer {values['tokenizer']}", ("vocab_size",), reason)
    check_engine_values(values)
    private_values(context_, values)
    options = TrainOptions(**values)
    if print_config:
        show_config(options)
        return
    if not options.quiet and launched()[0] == 0:  # before the imports, which take as long as all that was done so far
        names = ["standard input" if name == "-" else name for name in options.texts]
        show_text(f"reading {', '.join(names) or 'the language reference included with Python'}", "dim")
    from onfoot.train import pretrain

    if find_lr:
        show_lr_range(context_, options, pretrain.make_trainer)
        return
    with starting(options.quiet):
        trainer = pretrain.start(out or next_run_folder(Path("runs"), "train"), options)
    train_and_report(trainer)


def show_lr_range(
    context: typer.Context, options: TrainingOptions, make_trainer: Callable[[Path, Any, Path | None], Trainer]
) -> None:
    """Makes a learning-rate range test of a run, in a temporary folder, and prints it."""
    from onfoot.train import lr_range

    reject_with(context, "--find-lr", ("out", "lr"), "it makes no run, and tests all learning rates", in_file=False)
    lr_range.check(options)
    with TemporaryDirectory(prefix="onfoot-", ignore_cleanup_errors=True) as folder:
        with starting(options.quiet):
            trainer = make_trainer(Path(folder), options, None)
        model, source, options = trainer.model, trainer.source, trainer.options
        del trainer  # its optimizer's memory
        show_text(source.report())
        show_text(f"{lr_range.STEPS} steps, in which the learning rate rises; the model and the data stay as they are")
        show_text(lr_range.find_lr(model, source, options).report())


class _ShowStart(logging.Handler):
    """Shows what is being done."""

    def __init__(self, working: Working) -> None:
        super().__init__()
        self.working = working

    def emit(self, record: logging.LogRecord) -> None:
        self.working.begin(record.getMessage(), getattr(record, "count", None))


@contextmanager
def starting(quiet: bool) -> Iterator[None]:
    """Says what takes long before a run starts or after its end, on rank 0 and unless it is quiet."""
    if quiet or launched()[0] != 0:
        yield
        return
    from onfoot.train.start import Working, logger

    level = logger.level
    with Working() as working:
        handler = _ShowStart(working)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


def check_engine_values(values: dict[str, Any]) -> None:
    """Raises ValueError for an option that has no effect without pairs of the user's own."""
    if values["engine_unchecked"] and not is_own(values["engine"]):
        raise ValueError(f"--engine-unchecked is for pairs of your own (--engine my_ops.py), got {values['engine']}")


def private_values(context: typer.Context, values: dict[str, Any]) -> None:
    """For private training: no other clipping, and a secret seed unless one is given."""
    if values["dp_clip"] is None:
        return
    reject_with(context, "--dp-clip", ("clip",), "it clips the gradient of every example instead of their sum")
    if "seed" not in explicit_options(context):
        values["seed"] = secrets.randbits(62)  # whoever knows the seed can subtract the noise


def next_run_folder(parent: Path, name: str) -> Path:
    """The first of parent/name-001, parent/name-002, ... that does not exist."""
    return next(p for i in range(1, 10**6) if not (p := parent / f"{name}-{i:03d}").exists())


def resume_run(context: typer.Context, run: Path, resume: Callable[..., tuple[Trainer, list[str]]]) -> None:
    """Resumes a run with its options, and with those that are given anew."""
    changes = {
        name: context.params[name]
        for name in explicit_options(context)
        if name not in ("resume", "threads", "download")
    }
    with starting(bool(changes.get("quiet"))):
        trainer, warnings = resume(run, **changes)
    for warning in warnings:
        show_text(warning, "yellow")
    options, step = trainer.options, trainer.state.step
    if step >= options.steps:
        trainer.run()  # no steps left, but the loss curve may not have been drawn
        show_text(f"{run} is complete: all {options.steps:,} steps are done; --resume {run} --steps N makes more")
        return
    show_text(f"resuming {run} at step {step:,}{_changes(trainer)}")
    train_and_report(trainer)


def _changes(trainer: Trainer) -> str:
    """What is different from this step on, and how the learning rate continues."""
    options, step = trainer.options, trainer.state.step
    if not options.changes or options.changes[-1]["step"] != step:
        return ""
    before: dict[str, Any] = options.changes[-1]["before"]
    said = ", ".join(f"{name} {getattr(options, name)} (was {value})" for name, value in before.items())
    if not RATES & set(before) or not step:
        return f" with {said}"
    start = f" with {said}: the learning rate goes from {options.learning_rate(step - 1):.2e} to"
    if options.warmup >= options.steps - step:
        return f"{start} {options.learning_rate(options.steps - 1):.2e} at step {options.steps:,}, within the warmup"
    end = "stays there" if options.schedule == "constant" else (
        f"decays ({options.schedule}) to {options.learning_rate(options.steps - 1):.2e} at step {options.steps:,}"
    )  # fmt: skip
    return f"{start} {options.lr:.2e} over {_counted(options.warmup, 'step')}, then {end}"


def train_and_report(trainer: Trainer) -> None:
    """Trains, then prints the validation loss, a sample, the files written and the next command."""
    from onfoot.train.pretrain import bits_per_byte

    model, options, run = trainer.model, trainer.options, trainer.folder
    assert run is not None
    show_text(trainer.source.report())
    show_text(
        f"{model.n_trainable:,} of {model.n_params:,} parameters are trainable; {model.dtype}, engine "
        f"{model.engine.name}; run folder {run}"
    )
    show_text(summary(trainer))
    if options.quiet and options.warmup_warning:  # else it is said with the progress
        show_text(f"warning: {options.warmup_warning}", "yellow")
    if trainer.privacy is not None:
        show_text(trainer.privacy.report())
    outcome = trainer.run()
    if outcome.stopped:
        go_on = f"onfoot {options.command} --resume {run} --patience 0"
        show_text(f"\nstopped at step {outcome.state.step:,}: {outcome.stopped}; to go on all the same: {go_on}")
    elif outcome.interrupted:
        show_text(
            f"\nstopped and saved at step {outcome.state.step}; resume with: onfoot {options.command} --resume {run}"
        )
        show_spent(trainer, outcome.state.step)
        raise typer.Exit(130)
    loss = outcome.validation_loss if outcome.validation_loss is not None else outcome.state.best_loss
    if isinstance(trainer.source, PreferenceSource):
        show_text(f"\nvalidation loss {loss:.4f} nats per pair (0.6931 is that of the reference)")
    else:
        show_text(f"\nvalidation loss {loss:.4f} nats per token (perplexity {math.exp(min(loss, 700)):.2f})")
    if trainer.bigram is not None:
        below = trainer.bigram - loss
        word = f"{below:.2f} below" if below > 0 else f"{-below:.2f} above"
        show_text(
            f"a bigram model fitted on the training text has {trainer.bigram:.4f} nats per token on the held-out text: "
            f"the model is {word} it"
        )
    sample = None
    try:
        with starting(options.quiet):
            scale = bits_per_byte(trainer, loss)
        if scale:
            said = ", ".join(f"{name} {bits:.2f}" for name, bits in scale)
            show_text(f"in bits per byte of the held-out text: {said}")
        show_spent(trainer, outcome.state.step)
        sample = trainer.sample()
    except KeyboardInterrupt:  # the run is complete all the same
        sample = "(interrupted)"
    if sample is not None:
        show_text("\nsample:\n  " + sample.replace("\n", "\n  "))
    adapter = model.active_adapter is not None
    what, library = ("adapter", "PEFT") if adapter else ("model  ", "transformers")
    show_text(
        f"\n{what} {run / 'best'}  (also loads in {library})\ncurve   {run / 'loss.png'}\n"
        f"next    onfoot generate {shell_word(run)} {_prompt(trainer)}"
    )
    if adapter:
        show_text(f"        onfoot merge {shell_word(run)} --out {shell_word(run / 'merged')}")


def show_spent(trainer: Trainer, steps: int) -> None:
    """Prints the ε that a private run has spent."""
    if trainer.privacy is not None:
        show_text(f"{trainer.privacy.guarantee(steps)}: for the weights, and for each {trainer.source.unit}")


def summary(trainer: Trainer) -> str:
    """The length of the run and its learning rate in one line."""
    options = trainer.options
    rows = options.batch_size * options.accumulate
    per_pass = trainer.source.rows if options.dp_clip is None else trainer.source.n_examples
    phases = options.phases()  # a resumed run may have had another batch
    ends = [*(step for step, _ in phases[1:]), options.steps]
    all_rows = sum((end - step) * o.batch_size * o.accumulate for (step, o), end in zip(phases, ends, strict=True))
    passes = f"{all_rows / per_pass:.3g}"
    return (
        f"{_counted(options.steps, 'step')} of {_counted(rows, 'row')}, {passes} pass{'es' * (passes != '1')} over the "
        f"data; learning rate {options.lr:g} after {_counted(options.warmup, 'warmup step')}"
    )


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _prompt(trainer: Trainer) -> str:
    """Options of `onfoot generate` with a prompt from the validation data: a question, a prompt, or a word."""
    if trainer.options.command == "finetune":
        from onfoot.data.sft import SftSource

        question, prompt = trainer.source.question(), trainer.source.prompt_text(trainer.model.tokenizer)
        chat = "--chat " if question else ""
        if not (question or prompt) and isinstance(trainer.source, SftSource) and trainer.model.tokenizer is not None:
            prompt = first_word(
                trainer.model.tokenizer.decode(trainer.source.held_out.examples[0].ids.tolist())
            )  # texts
        return f"{chat}--prompt {shell_word(question or prompt)}" if question or prompt else ""
    tokenizer = trainer.model.tokenizer
    text = tokenizer.decode(trainer.source.held_out.tokens[:PROMPT_TOKENS].tolist()) if tokenizer is not None else ""
    first = first_word(text)
    return f"{f'--prompt {shell_word(first)} ' if first else ''}--max-new-tokens 200 --slide"


def first_word(text: str) -> str:
    """The first whole word of three or more letters, else the first printable part between spaces; or nothing.

    The text may begin within a word.
    """
    found = re.search(r"(?<=\s)[^\W\d_]{3,}(?!\w)", text) or re.search(r"[^\W\d_]{3,}", text)
    return found[0] if found else next((part for part in text.split() if part.isprintable()), "")
