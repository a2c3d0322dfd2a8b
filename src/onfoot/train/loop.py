"""The training loop: steps, evaluations, checkpoints and interrupts, each told to the callbacks.

A `Source` provides the batches, and `write` saves the weights into a checkpoint.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from onfoot.arrays import Array
from onfoot.data.preference_source import PreferenceSource
from onfoot.formats.files import shown
from onfoot.formats.run_folder import checkpoint_folder, read_state, run_in
from onfoot.models.model import Model
from onfoot.own_engine import OwnEngine
from onfoot.train.automatic import settle
from onfoot.train.averaging import WeightAverage
from onfoot.train.callbacks import (
    Callback,
    Checkpoints,
    EarlyStopping,
    Invariants,
    LogFile,
    Logging,
    LossCurve,
    Progress,
    Samples,
    Step,
    Validation,
    as_callbacks,
    logger,
    make_loggable,
)
from onfoot.train.checkpoint import restore_average, restore_optimizer, save_checkpoint
from onfoot.train.engine_check import EngineCheck
from onfoot.train.interrupts import stop_requested
from onfoot.train.lock import take_lock
from onfoot.train.log import Log
from onfoot.train.objective import StepResult, objective_of
from onfoot.train.options import TrainingOptions
from onfoot.train.parallel import world
from onfoot.train.privacy import plan
from onfoot.train.rates import freeze
from onfoot.train.shard import ShardedAdamW
from onfoot.train.source_batches import naming_source
from onfoot.train.trackers import tracker
from onfoot.train.update import make_update, replicated_state


@dataclass
class State:
    """The trainer's state in a checkpoint, besides the weights and the optimizer."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """The result of a run."""

    state: State
    checkpoint: Path | None  # None without a run folder
    validation_loss: float | None
    interrupted: bool  # before the last step
    stopped: str = ""  # why, if a callback has stopped it


class CallbackError(ValueError):
    """A function of the user's has failed: a callback, a learning rate or a source. A single rank saves before."""


class DivergedError(ValueError):
    """The loss or a gradient is not finite."""


class Trainer:
    """One run: a model, its data, its optimizer, and what hears its events.

    `data` is a `Source`, or what `as_source` makes one of: text files, examples, preference pairs, or token ids.
    Without `options`, they are chosen for examples by their number, as `onfoot finetune` does. With a folder `out`, the
    run is logged, saved, and can be resumed by `restore`; a folder that has another run is refused. Without one, it
    only trains. `run()` trains to the end; iterating over a trainer makes one step at a time, and leaving the loop
    stops the run.
    """

    def __init__(
        self,
        model: Model,
        data: Any,
        options: TrainingOptions | None = None,
        callbacks: Iterable[Any] = (),
        *,
        out: str | Path | None = None,
        write: Callable[[Path], None] | None = None,
    ) -> None:
        if not isinstance(model, Model):
            raise ValueError(f"model must be a model, got {type(model).__name__}; onfoot.load(path) loads one")
        if not isinstance(out, str | PathLike | None):
            raise ValueError(f"out must be the name of a folder, got {type(out).__name__}")
        options, self.source = settle(data, model, options)
        freeze(model, options.frozen)
        if options.dropout:
            set_dropout(model, options.dropout)
        self.options, self.model = options, model
        has_pairs = isinstance(self.source, PreferenceSource)
        self._is_reference = has_pairs and self.source is not data and model.active_adapter is None
        self.folder = None if out is None else Path(out)
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"out={str(self.folder)!r} is a file; choose a folder for the run")
        self.write = write or (model.save if model.active_adapter is None else model.save_adapter)
        model.recompute = options.recompute == "block"
        self.bigram: float | None = None  # the loss drawn as a baseline in the loss plot
        self.world = world()
        self.share_args = () if self.world.size == 1 else (self.world.share,)  # arguments of the source's methods
        self.accumulator, self.optimizer = make_update(self.world, model, options)
        self.average = WeightAverage(model, options.ema) if options.ema else None
        self.privacy = None if options.dp_clip is None else plan(options, self.source.n_examples, self.world.size)
        self.objective = objective_of(self.source, self.privacy)
        self.learning_rate: Callable[[int], float] = options.learning_rate
        self.state = State()
        self.saved: int | None = None  # the step of the last checkpoint
        self._continues = self.folder is None  # whether a run in the folder is this one
        self.log = None if self.folder is None else Log(self.folder / "log.jsonl", self.world.writes)
        self.validation_loss: float | None = None
        self.lock: FileLock | None = None  # held on the run folder
        self.warnings: list[str] = []  # about the log, when the run was resumed
        self.callbacks = as_callbacks(callbacks)
        self._engine_check = EngineCheck()
        self._own = self._own_callbacks()
        self._telling = list[str]()  # the events that callbacks are hearing, the last caused by the one before
        self.stopped = ""  # why the run was stopped by `stop`
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def _own_callbacks(self) -> list[Callback]:
        """What a run does besides stepping; after the user's callbacks, which may add to an evaluation."""
        out: list[Callback] = [Logging()]
        if isinstance(self.model.engine, OwnEngine):
            out.append(self._engine_check)
        if self.options.watch:
            out.append(Invariants())
        if self.options.sample_tokens:
            out.append(Samples())
        if self.options.patience:
            out.append(EarlyStopping())
        if self.log is not None:
            out.append(LogFile(self.log))
        if self.world.writes:
            out += tracker(self.options.log, self.folder)
        if not self.options.quiet:
            out.append(Progress())
        return out if self.folder is None else [*out, Checkpoints(), LossCurve()]

    def check_engine(self) -> None:
        """Compares a user's own pairs with ours on the first batch, once; a ValueError names the first wrong one."""
        if isinstance(self.model.engine, OwnEngine):
            self._engine_check.check(self)

    def restore(self, checkpoint: str | Path | None) -> None:
        """Restores the optimizer, state and log from a checkpoint of this run, which then goes on in its folder.

        The caller restores the weights: `onfoot.load(checkpoint)`. None is step 0, with an empty log.
        """
        if checkpoint is None:
            self._continues = True
            if self.log is not None and self.world.writes:
                self.log.path.unlink(missing_ok=True)
            return
        checkpoint = Path(checkpoint)
        if self._is_reference:
            raise ValueError(
                f"{checkpoint} does not have the weights before preference tuning, which are its reference; resume a "
                f"run on all weights with onfoot finetune --dpo --full, or train LoRA layers"
            )
        saved = read_state(checkpoint)
        if saved["step"] > self.options.steps:
            raise ValueError(
                f"steps={self.options.steps} is less than the {saved['step']:,} steps of {checkpoint}; pass "
                f"steps={saved['step']} or more"
            )
        if self.folder is not None:
            self._continues = self.folder.resolve() in checkpoint.resolve().parents
            self._check_folder()
        restore_optimizer(checkpoint, self.optimizer)
        if self.average is not None:
            restore_average(checkpoint, self.average)
        self.state = State(**{name: saved[name] for name in vars(State()) if name in saved})
        self.saved = self.state.step
        if self.log is not None:
            self.warnings = self.log.resume(self.state.step)

    def _check_folder(self) -> None:
        """Raises ValueError if the folder has another run: their logs and checkpoints would be mixed."""
        if self._continues:
            return

        def check() -> None:
            found = run_in(self.folder) if self.world.writes and self.folder is not None else None
            if found is not None:
                raise ValueError(
                    f"{self.folder} already contains a run ({found.name}); resume it with "
                    f"trainer.restore(checkpoint), or choose another out"
                )

        self.world.run_all_or_raise(check)
        self._continues = True

    def _check_log(self) -> None:
        """Raises ValueError if another trainer has continued the run: its steps would be in the log twice."""

        def check() -> None:
            done = 0 if self.log is None or not self.world.writes else self.log.last_step()
            if done > self.state.step:
                raise ValueError(
                    f"{self.folder} is at step {done:,}, and this trainer at step {self.state.step:,}: another one "
                    f"has continued the run; load the last checkpoint, and restore it in a new trainer"
                )

        self.world.run_all_or_raise(check)

    def run(self) -> Outcome:
        """Trains to the last step, or until stopped or interrupted, and saves a checkpoint either way."""
        for _ in self:
            pass
        return self.outcome

    def stop(self, reason: str = "stopped by a callback") -> None:
        """Ends the run after the current step."""
        self.stopped = reason

    @property
    def outcome(self) -> Outcome:
        """The result so far."""
        state = self.state
        where = None if self.folder is None else checkpoint_folder(self.folder, state.step)
        return Outcome(state, where, self.validation_loss, state.step < self.options.steps, self.stopped)

    @property
    def evaluates_now(self) -> bool:
        """Whether the validation loss is measured after this step."""
        return self.state.step == self.options.steps or self.state.step % self.options.eval_every == 0

    def __iter__(self) -> Iterator[Step]:
        """Makes one step after the other; whatever belongs to a step is done before it is yielded."""
        guard = nullcontext() if self.folder is None else self.world.guard(self.folder, self.options.command)
        with guard, self._locked(), stop_requested() as interrupted:
            self._check_folder()
            self._check_log()
            self.stopped = ""
            started = time.monotonic() - self.state.seconds
            try:
                self._tell("on_begin")
                try:
                    while self.state.step < self.options.steps and not self._stops(interrupted()):
                        yield self._next(started)
                except GeneratorExit:  # the caller has left the loop
                    pass
                self._tell("on_end", self.outcome)
            except BaseException as error:
                self._tell_error(error)
                raise

    def _stops(self, interrupted: bool) -> bool:
        """Whether any rank was interrupted or stopped."""
        return self.world.any(interrupted or bool(self.stopped))

    def _next(self, started: float) -> Step:
        """One step, its evaluation and its checkpoint, as far as they are due."""
        lr = self._learning_rate()
        tick = time.monotonic()
        loss, norm, n_tokens, more = self.step(lr)
        seconds = time.monotonic() - tick
        if self.world.size > 1:
            more = {"waiting": round(self.accumulator.times.waiting / seconds, 4), **more}
        self.state.step += 1
        if self.average is not None:
            self.average.update(self.state.step)
        self.state.seconds = time.monotonic() - started
        step = Step(self.state.step, loss, lr, norm, n_tokens, seconds, more)
        self._tell("on_step", step)
        if self.evaluates_now:
            self.evaluate()
        return step

    def _learning_rate(self) -> float:
        """The rate of the next step. That of a user's function must be finite and not negative."""
        with self.saved_if_it_fails("trainer.learning_rate"):
            if not callable(self.learning_rate):
                raise TypeError(f"it must be a function of the step number, got {shown(self.learning_rate)}")
            lr = float(self.learning_rate(self.state.step))
            if not 0 <= lr < math.inf:
                raise ValueError(f"the learning rate of step {self.state.step + 1} must be finite and >= 0, got {lr}")
        return lr

    def _tell(self, event: str, *args: Any) -> None:
        """Tells all callbacks about an event."""
        if event in self._telling:
            circle = " → ".join([*self._telling[self._telling.index(event) :], event])
            raise ValueError(f"{circle} would never end; call evaluate() and save() at another event, such as on_step")
        self._telling.append(event)
        try:
            for callback in (one for one in self.callbacks if callable(getattr(one, event, None))):
                with self.saved_if_it_fails(f"{type(callback).__name__}.{event}"):
                    getattr(callback, event)(self, *args)
                    for one in args:
                        make_loggable(one)
            for callback in self._own:
                getattr(callback, event)(self, *args)
        finally:
            self._telling.pop()

    @contextmanager
    def saved_if_it_fails(self, what: str) -> Iterator[None]:
        """When a function of the user's fails, raises an error that names it; a run of one rank is saved first."""
        try:
            yield
        except CallbackError:  # of another function, which it names; the run is saved
            raise
        except Exception as error:
            saved = ""
            if self.folder is not None and self.world.size == 1:  # ranks save together, and the others may not be here
                if self.saved != self.state.step:
                    self.save()
                saved = f"; the run is saved at step {self.state.step}, in {self.folder}"
            failed = f"{what} failed after step {self.state.step}"
            raise CallbackError(f"{failed}: {type(error).__name__}: {error}{saved}") from error

    def _tell_error(self, error: BaseException) -> None:
        """Tells all callbacks about the error that ends the run; one that fails at that does not replace it."""
        for callback in (one for one in (*self.callbacks, *self._own) if callable(getattr(one, "on_error", None))):
            try:
                callback.on_error(self, error)
            except Exception as another:
                logger.error("%s.on_error failed: %s: %s", type(callback).__name__, type(another).__name__, another)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the run's lock, so that no other process trains the same run."""
        if self.folder is not None and self.world.writes and (self.lock is None or not self.lock.is_locked):
            self.lock = take_lock(self.folder)
        try:
            yield
        finally:
            if self.lock is not None:
                self.lock.release(force=True)

    def step(self, lr: float) -> StepResult:
        """The result of one optimizer step made alone: no event but `on_gradient`, no evaluation; it is not counted."""
        return self.objective.step(self, lr)

    def gradient_listener(self) -> Callable[[dict[str, Array]], None] | None:
        """A function that tells the callbacks about gradients; None if none of them has `on_gradient`."""
        methods = [getattr(callback, "on_gradient", None) for callback in self.callbacks]
        hears = any(
            callable(method) and getattr(method, "__func__", method) is not Callback.on_gradient for method in methods
        )
        return (lambda grads: self._tell("on_gradient", grads)) if hears else None

    def divergence_error(self, what: str, changed: bool = False) -> DivergedError:
        """The error of a step whose loss or gradient is not finite."""
        memory = "some weights in memory were already updated, but " if changed else ""
        clip = f"a smaller --clip (was {self.options.clip:g})" if self.options.clip else "with --clip 1"
        return DivergedError(
            f"step {self.state.step + 1}: {what}; training stopped; {memory}no checkpoint was overwritten. Start a new "
            f"run with a lower --lr (was {self.options.lr:g}), or {clip}"
        )

    def dropout_seed(self, i: int) -> int:
        """The dropout seed of microbatch i of this step, different on each rank."""
        where = [self.options.seed, self.state.step, i, *([self.world.rank] if self.world.rank else [])]
        return int(np.random.SeedSequence(where).generate_state(1)[0])

    def evaluate(self) -> Validation | None:
        """Measures the validation loss, and tells the callbacks; None if there is no validation data."""
        self._check_folder()
        with self.averaged_weights():
            sums = self.objective.validate(self)
        total, n_all, *others = self.world.sum(sums.loss, sums.n, *sums.others.values())
        if not n_all:
            return None
        self.validation_loss = loss = total / n_all
        step = self.state.step
        if not math.isfinite(loss):
            raise self.world.agreed(self.divergence_error(f"the validation loss is {loss}"))
        improved = loss < self.state.best_loss
        if improved:
            self.state.best_loss, self.state.best_step = loss, step
        means = {name: value / n_all for name, value in zip(sums.others, others, strict=True)}
        evaluation = Validation(step, loss, improved, step == self.options.steps, sums.first, means)
        evaluation.record |= evaluation.measured
        evaluation.lines.append(f"step {step}: validation loss {loss:.4f}{self.objective.describe(means)}")
        self._tell("on_evaluation", evaluation)
        self.world.wait()
        return evaluation

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """With --ema, the model has the averaged weights for a while, as when it is evaluated and saved."""
        with nullcontext() if self.average is None else self.average.in_model():
            yield

    def sample(self) -> str | None:
        """Generated text at temperature 0.7 and top-p 0.9, on rank 0; None elsewhere and where samples are disabled."""
        if not self.world.writes:
            return None
        tokenizer, n = self.model.tokenizer, self.options.sample_tokens
        if tokenizer is None or not n or not self.model.config.causal:
            return None
        with self.averaged_weights(), naming_source(self, "prompt"):
            prompt = self.source.prompt()
            if prompt is None:
                return None
            sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": self.options.seed}
            out = self.model.generate([prompt], n, slide=True, **sampling)[0]
        return tokenizer.decode(out.tolist())

    def save(self) -> None:
        """Saves a checkpoint, complete on return. Before the first evaluation, the newest checkpoint is the best."""
        if self.folder is None:
            raise ValueError(
                "this trainer has no folder to save a run in; pass Trainer(…, out=FOLDER), or model.save()"
            )
        self._check_folder()
        if not math.isfinite(self.state.best_loss):
            self.state.best_step = self.state.step
        self.world.compare(replicated_state(self.optimizer), f"step {self.state.step}")
        values = {k: v for k, v in vars(self.state).items() if not isinstance(v, float) or math.isfinite(v)}
        if self.world.writes:
            kept = self.options.keep, self.options.keep_trajectory
            for line in save_checkpoint(self.folder, self.write, self.optimizer, values, *kept, self.average):
                print(line, file=sys.stderr)
        elif isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.send_moments()
        self.saved = self.state.step
        self.world.wait()
        self._tell("on_checkpoint", checkpoint_folder(self.folder, self.state.step))


def set_dropout(model: Model, p: float) -> None:
    """Sets all dropout probabilities of a loaded model's configuration."""
    fields = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout")
    model.config = replace(model.config, **{name: p for name in fields if hasattr(model.config, name)})
