"""What happens during a run besides stepping: progress, log, samples, invariants, checkpoints, curve.

Each is a `Callback`, as a user's own are. `Trainer` tells every callback about every event, in their order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onfoot.arrays import Array
from onfoot.data.batches import Batch
from onfoot.formats.files import shown
from onfoot.train.invariants import invariants
from onfoot.train.log import Log, draw_losses
from onfoot.train.progress import Reporter, duration

if TYPE_CHECKING:
    from onfoot.train.loop import Outcome, Trainer

logger = logging.getLogger("onfoot.train")
logger.addHandler(logging.NullHandler())  # silent unless the user configures logging


@dataclass
class Step:
    """One optimizer step."""

    step: int  # the number of steps so far, this one included
    loss: float  # nats per target; nan if a private step sampled no example
    lr: float
    grad_norm: float  # before clipping
    n_tokens: int
    seconds: float
    more: dict[str, Any] = field(default_factory=dict)  # of several ranks, private training or pairs, for the log

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


@dataclass
class Validation:
    """The validation loss after a step. Callbacks may add to `record`, which is logged, and to `lines`, printed."""

    step: int
    loss: float
    improved: bool  # the best so far
    last: bool  # of the run
    batch: Batch | None  # the first of the validation data
    means: dict[str, float] = field(default_factory=dict)  # of preference pairs: margin and accuracy
    record: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def measured(self) -> dict[str, float]:
        """What `record` says whatever callbacks add to it."""
        return {"step": self.step, "val_loss": self.loss} | {f"val_{name}": x for name, x in self.means.items()}


class Callback:
    """Hears the events of a run. Subclasses override what they need.

    `trainer.stop()` ends the run after the current step, saved. `trainer.learning_rate` is a function of the step
    number, and may be replaced. With several ranks, every rank has its callbacks, and each hears every event.
    """

    def on_begin(self, trainer: Trainer) -> None:
        """Before the first step of this process."""

    def on_gradient(self, trainer: Trainer, grads: dict[str, Array]) -> None:
        """Before an update, with the gradients of all trainable parameters, which may be changed in place.

        Called before clipping. A run whose callbacks override it holds all gradients at once.
        """

    def on_step(self, trainer: Trainer, step: Step) -> None:
        """After an update."""

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        """After the validation loss was measured, and before a checkpoint is saved."""

    def on_checkpoint(self, trainer: Trainer, folder: Path) -> None:
        """After a checkpoint was saved, completely."""

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        """After the last step, or after the run was stopped and saved."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """When the run ends with an exception, which is raised afterwards."""


LOGGED = {"step", "loss", "lr", "grad_norm", "tokens_per_s"}  # the names in the log of every step
FIGURES = {Step: ("step", "loss", "lr", "grad_norm", "n_tokens", "seconds"), Validation: ("step", "loss")}
EVENTS = [name for name in vars(Callback) if name.startswith("on_")]
OTHER_TRAINERS_EVENTS = {  # those of transformers, Lightning and Keras that have an equal here
    "on_train_begin": "on_begin", "on_train_start": "on_begin", "on_fit_start": "on_begin",
    "on_pre_optimizer_step": "on_gradient", "on_before_optimizer_step": "on_gradient",
    "on_after_backward": "on_gradient", "on_step_end": "on_step", "on_optimizer_step": "on_step",
    "on_train_batch_end": "on_step", "on_batch_end": "on_step", "on_log": "on_step",
    "on_evaluate": "on_evaluation", "on_validation_end": "on_evaluation", "on_validation_epoch_end": "on_evaluation",
    "on_test_end": "on_evaluation", "on_save": "on_checkpoint", "on_save_checkpoint": "on_checkpoint",
    "on_train_end": "on_end", "on_fit_end": "on_end", "on_exception": "on_error",
}  # fmt: skip
MISSPELT = 0.85  # the similarity from which on a name is one of EVENTS misspelt; on_load_checkpoint is below it


def as_callbacks(given: Any) -> list[Any]:
    """The callbacks in a list. An object of another class is one if it has a method of at least one event."""
    if isinstance(given, type) or not isinstance(given, Iterable):
        raise ValueError(f"callbacks must be a list, got {_named(given)}; put it into a list, as in [StopWhenGood()]")
    out = list(given)
    for number, one in enumerate(out):
        if isinstance(one, type):
            raise ValueError(f"callbacks[{number}] is {_named(one)}; pass an instance, {one.__name__}()")
        if not any(callable(getattr(one, event, None)) for event in EVENTS):
            raise ValueError(
                f"callbacks[{number}] is {_named(one)}, which has no method of an event: {', '.join(EVENTS)}"
            )
        if isinstance(one, Callback):
            _check_names(type(one))
    return out


def _check_names(kind: type[Callback]) -> None:
    """Raises ValueError for a method that is named like an event and is none: it would never be called."""
    names = {name: None for base in kind.__mro__ if issubclass(base, Callback) for name in vars(base)}
    for name in names:  # not those of other bases, such as transformers' TrainerCallback
        if name.startswith("on_") and name not in EVENTS and callable(getattr(kind, name)):
            near = OTHER_TRAINERS_EVENTS.get(name) or next(iter(get_close_matches(name, EVENTS, 1, MISSPELT)), None)
            meant = f"did you mean {near}?" if near else f"choose from {', '.join(EVENTS)}."
            raise ValueError(
                f"{kind.__name__}.{name} would never be called: there is no such event; {meant} A method of your own "
                f"needs a name that does not begin with on_"
            )


def make_loggable(event: Any) -> None:
    """Makes JSON of what a callback has added: Python's numbers of NumPy's and PyTorch's, None of nan and infinity.

    A TypeError or ValueError names what the log cannot hold.
    """
    for name in FIGURES.get(type(event), ()):
        figure = _number(getattr(event, name))
        if type(figure) not in (int, float):
            raise TypeError(f"{name} must stay a number, got {shown(figure)}")
        setattr(event, name, figure)
    if isinstance(event, Step):
        taken = sorted(LOGGED.intersection(event.more))
        if taken:
            raise ValueError(f"{taken[0]} is in the log of every step; choose another name in step.more")
        event.more = {name: _loggable(name, value) for name, value in event.more.items()}
    if isinstance(event, Validation):
        changed = [name for name, x in event.measured.items() if event.record.get(name) != x]
        if changed:
            attribute = {"step": "step", "val_loss": "loss"}.get(changed[0], "means")
            raise ValueError(
                f"evaluation.{attribute} and evaluation.record[{changed[0]!r}] must stay as they were measured; choose "
                f"another name in evaluation.record for what you add"
            )
        event.record = {name: _loggable(name, value) for name, value in event.record.items()}


def _loggable(name: str, value: Any) -> Any:
    def number(one: Any) -> Any:
        figure = _number(one)
        if figure is one:
            raise TypeError(
                f"{name} has a value of the class {type(one).__name__}, which the log cannot hold; pass a number"
            )
        return figure

    if not isinstance(name, str):
        raise TypeError(f"names in the log must be strings, got {name!r}")
    return json.loads(json.dumps(value, default=number), parse_constant=lambda _: None)


def _number(value: Any) -> Any:
    """Python's number of NumPy's or PyTorch's; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _named(one: Any) -> str:
    return f"the class {one.__name__}" if isinstance(one, type) else f"an object of the class {type(one).__name__}"


class Progress(Callback):
    """A bar on a terminal or in a notebook, plain lines elsewhere."""

    def __init__(self) -> None:
        self.report: Reporter | None = None
        self.speed = 0.0  # tokens per second, smoothed

    def on_begin(self, trainer: Trainer) -> None:
        self.report = Reporter(trainer.options.steps, trainer.state.step).__enter__()
        if trainer.options.warmup_warning:
            self.report.say(f"warning: {trainer.options.warmup_warning}")

    def on_step(self, trainer: Trainer, step: Step) -> None:
        assert self.report is not None
        rate = step.tokens_per_s
        self.speed = rate if self.speed == 0 else 0.9 * self.speed + 0.1 * rate
        figures = {"loss": f"{step.loss:.4f}"}
        if trainer.validation_loss is not None:
            figures["val"] = f"{trainer.validation_loss:.4f}"
        figures |= {"lr": f"{step.lr:.2e}", "norm": f"{step.grad_norm:.2f}", "tokens/s": f"{self.speed:,.0f}"}
        if "waiting" in step.more:
            figures["waiting"] = f"{step.more['waiting']:.0%}"
        self.report.update(step.step, figures | trainer.objective.figures(step.more))

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        if not evaluation.lines:  # a callback has removed them
            return
        first, *others = evaluation.lines
        report = self.report or Reporter(trainer.options.steps, trainer.state.step)  # evaluated outside of a run
        for line in (f"{first}  ({duration(trainer.state.seconds)})", *others):
            report.say(line)

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        self._close()

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.report is not None:
            self.report.__exit__()


class LogFile(Callback):
    """log.jsonl: one line per step and per evaluation."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def on_step(self, trainer: Trainer, step: Step) -> None:
        known = {"loss": step.loss if step.loss == step.loss else None, "lr": step.lr, "grad_norm": step.grad_norm}
        self.log.append({"step": step.step, **known, "tokens_per_s": round(step.tokens_per_s), **step.more})

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        self.log.append(evaluation.record)


class LossCurve(Callback):
    """loss.png, drawn from the log at the end."""

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        if trainer.world.writes and trainer.folder is not None and trainer.log is not None:
            draw_losses(trainer.log.read(), trainer.folder / "loss.png", trainer.bigram)


class Invariants(Callback):
    """Measures properties that the mathematics guarantees, at each evaluation."""

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        batch = evaluation.batch
        if batch is None or not trainer.world.writes:
            return
        found = invariants(trainer.model, batch.tokens[:2], batch.targets[:2])
        evaluation.record["invariants"] = found
        evaluation.lines[:1] = [
            "".join(evaluation.lines[:1]) + "".join(f"  {name} {value:.1e}" for name, value in found.items())
        ]


class Samples(Callback):
    """Text generated at each evaluation but the last, whose sample is the caller's to show."""

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        sample = None if evaluation.last else trainer.sample()
        if sample is not None:
            evaluation.record["sample"] = sample
            evaluation.lines.append("  " + sample.replace("\n", "\n  "))


class EarlyStopping(Callback):
    """Stops a run whose validation loss has not improved in the last `patience` evaluations.

    A run that was resumed with more steps or another learning rate is given that many evaluations again.
    """

    def on_begin(self, trainer: Trainer) -> None:
        self._check(trainer)

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        options, state = trainer.options, trainer.state
        since = max(state.best_step, options.last_schedule.since)
        if state.step // options.eval_every - since // options.eval_every >= options.patience:
            trainer.stop(f"no better validation loss in {options.patience} evaluations")


class Checkpoints(Callback):
    """Saves the run every `save_every` steps, at a new best loss, at the end, and for the trajectory."""

    def on_begin(self, trainer: Trainer) -> None:
        if trainer.options.keep_trajectory and trainer.saved is None:
            trainer.save()  # the initial state

    def on_step(self, trainer: Trainer, step: Step) -> None:
        if self._due(trainer) and not trainer.evaluates_now:
            trainer.save()

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        if evaluation.last or evaluation.improved or self._due(trainer):
            trainer.save()

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        if trainer.saved != trainer.state.step:
            trainer.save()

    def _due(self, trainer: Trainer) -> bool:
        every = (trainer.options.save_every, trainer.options.keep_trajectory)
        return any(n and trainer.state.step % n == 0 for n in every)


class Logging(Callback):
    """Steps, evaluations and checkpoints as messages of Python's logger "onfoot.train"."""

    def on_begin(self, trainer: Trainer) -> None:
        logger.info("step %d of %d, %s", trainer.state.step, trainer.options.steps, trainer.folder or "no run folder")
        if trainer.options.warmup_warning:
            logger.warning(trainer.options.warmup_warning)

    def on_step(self, trainer: Trainer, step: Step) -> None:
        logger.debug("step %d: loss %.4f, lr %.2e, norm %.2f", step.step, step.loss, step.lr, step.grad_norm)

    def on_evaluation(self, trainer: Trainer, evaluation: Validation) -> None:
        logger.info("step %d: validation loss %.4f", evaluation.step, evaluation.loss)

    def on_checkpoint(self, trainer: Trainer, folder: Path) -> None:
        logger.info("saved %s", folder)

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        logger.info("%s at step %d", "stopped" if outcome.interrupted else "done", outcome.state.step)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        logger.error("step %d: %s", trainer.state.step + 1, error)
