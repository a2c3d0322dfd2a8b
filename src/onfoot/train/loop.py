"""The training loop: steps, evaluations, checkpoints and interrupts.

`Source` provides the batches, and `write` saves the weights into a checkpoint.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock

from onfoot.arrays import to_numpy
from onfoot.data.batches import ALL, Batch, Share
from onfoot.formats.run_folder import checkpoint_folder, read_state
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.buckets import AllReduceGradients, GradientAccumulator, ReduceScatterGradients
from onfoot.train.checkpoint import restore_optimizer, save_checkpoint
from onfoot.train.interrupts import stop_requested
from onfoot.train.invariants import invariants
from onfoot.train.lock import take_lock
from onfoot.train.log import Log, draw_losses
from onfoot.train.optimizer import AdamW
from onfoot.train.options import LoopOptions
from onfoot.train.parallel import World, world
from onfoot.train.privacy import plan
from onfoot.train.private_step import PrivateResult, Settings, private_step
from onfoot.train.progress import Reporter, duration
from onfoot.train.shard import ShardedAdamW
from onfoot.train.step import Microbatch, accumulated_step, fused_step
from onfoot.train.vector import BucketLayout


class Source(Protocol):
    """Provides batches. A step number determines its batches, so resuming needs no other state.

    With several ranks, each asks for its share of the rows only.
    """

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]: ...

    def example_numbers(self, step: int) -> list[np.ndarray]:
        """For each microbatch of a step (of one rank), the number of each token's example, (B, T); padding has −1."""

    def validation(self, share: Share = ALL) -> Iterable[Batch]: ...

    @property
    def unit(self) -> str:
        """What private training protects, one by one."""

    @property
    def n_examples(self) -> int:
        """The number of these units."""

    def batches_of(self, examples: np.ndarray) -> list[Batch]:
        """Microbatches of the training examples of these numbers; each is a row, or a segment of one."""

    def prompt(self) -> np.ndarray | None:
        """The prompt of the sample at each evaluation, (T,), or None."""

    def report(self) -> str:
        """A summary of the training and validation data, in one or two lines."""


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
    checkpoint: Path
    validation_loss: float | None
    interrupted: bool


class Trainer:
    """One run: a model, its optimizer, its data and its folder."""

    def __init__(
        self,
        run: Path,
        options: LoopOptions,
        model: Model,
        source: Source,
        write: Callable[[Path], None],
        bigram: float | None = None,
    ) -> None:
        self.run, self.options, self.model, self.source, self.write = run, options, model, source, write
        model.recompute = options.recompute == "block"
        self.bigram = bigram  # the entropy drawn as a baseline in the loss plot
        self.world = world()
        self.share_args = () if self.world.size == 1 else (self.world.share,)  # arguments of the source's methods
        self.accumulator, self.optimizer = make_update(self.world, model, options)
        self.privacy = None if options.dp_clip is None else plan(options, source.n_examples, self.world.size)
        self.state = State()
        self.saved: int | None = None  # the step of the last checkpoint
        self.log = Log(run / "log.jsonl", self.world.writes)
        self.validation_loss: float | None = None
        self.lock: FileLock | None = None  # held on the run folder
        self.warnings: list[str] = []  # about the log, when the run was resumed

    def restore(self, checkpoint: Path | None) -> None:
        """Restores the optimizer, state and log from a checkpoint; None: step 0. The caller restores the weights."""
        if checkpoint is None:
            if self.world.writes:
                self.log.path.unlink(missing_ok=True)
            return
        restore_optimizer(checkpoint, self.optimizer)
        saved = read_state(checkpoint)
        self.state = State(**{name: saved[name] for name in vars(State()) if name in saved})
        self.saved = self.state.step
        self.warnings = self.log.resume(self.state.step)

    def train(self) -> Outcome:
        """Trains to the last step, or until interrupted, and saves a checkpoint either way."""
        with self.world.guard(self.run, self.options.command), self._locked():
            return self._train()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the run's lock, so that no other process trains the same run."""
        if self.world.writes and (self.lock is None or not self.lock.is_locked):
            self.lock = take_lock(self.run)
        try:
            yield
        finally:
            if self.lock is not None:
                self.lock.release(force=True)

    def _train(self) -> Outcome:
        options, state = self.options, self.state
        started = time.monotonic() - state.seconds
        with stop_requested() as interrupted, Reporter(options.steps, state.step) as report:
            speed, stopped = 0.0, False
            if options.keep_trajectory and self.saved is None:
                self.save()  # the initial state
            while state.step < options.steps and not (stopped := self.world.any(interrupted())):
                lr = options.learning_rate(state.step)
                tick = time.monotonic()
                loss, norm, n_tokens, private = self._step(lr)
                seconds = time.monotonic() - tick
                rate = n_tokens / seconds
                waited = {"waiting": round(self.accumulator.times.waiting / seconds, 4)} if self.world.size > 1 else {}
                speed = rate if speed == 0 else 0.9 * speed + 0.1 * rate
                state.step += 1
                state.seconds = time.monotonic() - started
                last = state.step == options.steps
                known = {"loss": loss if math.isfinite(loss) else None, "lr": lr, "grad_norm": norm}
                self.log.append(step=state.step, **known, tokens_per_s=round(rate), **waited, **private)
                figures = {"loss": f"{loss:.4f}"}
                if self.validation_loss is not None:
                    figures["val"] = f"{self.validation_loss:.4f}"
                figures |= {"lr": f"{lr:.2e}", "norm": f"{norm:.2f}", "tokens/s": f"{speed:,.0f}"}
                if waited:
                    figures["waiting"] = f"{waited['waiting']:.0%}"
                if self.privacy is not None:
                    figures |= {"clipped": f"{private['clipped']:.0%}", "ε": f"{self.privacy.epsilon(state.step):.3g}"}
                report.update(state.step, figures)
                improved = False
                if last or state.step % options.eval_every == 0:
                    improved = self.evaluate(report, show_sample=not last)
                if last or improved or self._save_due():
                    self.save()
            if stopped and self.saved != state.step:
                self.save()
        if self.world.writes:
            draw_losses(self.log.read(), self.run / "loss.png", self.bigram)
        return Outcome(state, checkpoint_folder(self.run, state.step), self.validation_loss, state.step < options.steps)

    def _step(self, lr: float) -> tuple[float, float, int, dict[str, Any]]:
        """One step, private or not, with what the log records about a private one."""
        if self.privacy is None:
            return *self.step(lr), {}
        result, n_tokens = self.private_step(lr)
        epsilon = self.privacy.epsilon(self.state.step + 1)
        private = {"clipped": round(result.clipped, 4), "epsilon": epsilon if math.isfinite(epsilon) else None}
        return result.loss, result.norm, n_tokens, private

    def private_step(self, lr: float) -> tuple[PrivateResult, int]:
        """One step of private training on a random sample of the examples, and its number of tokens."""
        assert self.privacy is not None
        privacy, step = self.privacy, self.state.step
        batches = self.source.batches_of(privacy.sample(step))
        microbatches = [Microbatch(*batch, self.dropout_seed(i)) for i, batch in enumerate(batches)]
        settings = Settings(privacy.clip, privacy.noise, privacy.expected, privacy.seed, step)
        result = private_step(self.model, self.optimizer, microbatches, lr, settings, self._diverged)
        return result, sum(b.tokens.size for b in batches)

    def _save_due(self) -> bool:
        """Whether a checkpoint of this step is due, for resuming or for the trajectory."""
        every = (self.options.save_every, self.options.keep_trajectory)
        return any(n and self.state.step % n == 0 for n in every)

    def step(self, lr: float) -> tuple[float, float, int]:
        """One optimizer step; returns the mean loss, the gradient norm before clipping, and the number of tokens."""
        batches = self.source.microbatches(self.state.step, *self.share_args)
        n_targets = sum(int((b.targets != IGNORE).sum()) for b in batches)
        divisor, n_tokens = self.world.sum(n_targets, sum(b.tokens.size for b in batches))  # over all ranks
        if divisor == 0:
            where = f"step {self.state.step + 1}"
            raise self.world.agreed(ValueError(f"{where}: all {n_tokens:.0f} targets are ignored ({IGNORE})"))
        microbatches = [Microbatch(*batch, self.dropout_seed(i)) for i, batch in enumerate(batches)]
        if len(microbatches) == 1 and self.world.size == 1 and not self.options.clip:
            loss, norm = fused_step(self.model, self.optimizer, microbatches[0], int(divisor), lr, self._diverged)
        else:
            settings = lr, self.options.clip, self._diverged, self.accumulator, self.world
            loss, norm = accumulated_step(self.model, self.optimizer, microbatches, int(divisor), *settings)
        return loss, norm, int(n_tokens)

    def _diverged(self, what: str, changed: bool = False) -> ValueError:
        memory = "some weights in memory were already updated, but " if changed else ""
        return ValueError(
            f"step {self.state.step + 1}: {what}; training stopped; {memory}no checkpoint was overwritten. Start a new "
            f"run with a lower --lr (was {self.options.lr:g}) or a smaller --clip"
        )

    def dropout_seed(self, i: int) -> int:
        """The dropout seed of microbatch i of this step, different on each rank."""
        where = [self.options.seed, self.state.step, i, *([self.world.rank] if self.world.rank else [])]
        return int(np.random.SeedSequence(where).generate_state(1)[0])

    def evaluate(self, report: Reporter, show_sample: bool) -> bool:
        """Logs the validation loss, the invariants and a sample; returns whether the loss is the best so far."""
        total, n_targets = 0.0, 0
        first = None
        for batch in self.source.validation(*self.share_args):
            first = first or batch
            n = int((batch.targets != IGNORE).sum())
            total += self.model.loss(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments) if n else 0.0
            n_targets += n
        total, n_all = self.world.sum(total, n_targets)
        self.validation_loss = total / n_all
        if not math.isfinite(self.validation_loss):
            raise self.world.agreed(self._diverged(f"the validation loss is {self.validation_loss}"))
        record: dict[str, Any] = {"step": self.state.step, "val_loss": self.validation_loss}
        line = f"step {self.state.step}: validation loss {self.validation_loss:.4f}"
        if self.options.watch and first is not None and self.world.writes:
            record["invariants"] = invariants(self.model, first.tokens[:2], first.targets[:2])
            line += "  " + "  ".join(f"{name} {value:.1e}" for name, value in record["invariants"].items())
        report.say(line + f"  ({duration(self.state.seconds)})")
        sample = self.sample() if show_sample else None
        if sample is not None:
            record["sample"] = sample
            report.say("  " + sample.replace("\n", "\n  "))
        self.log.append(**record)
        self.world.wait()
        if self.validation_loss < self.state.best_loss:
            self.state.best_loss, self.state.best_step = self.validation_loss, self.state.step
            return True
        return False

    def sample(self) -> str | None:
        """Generated text at temperature 0.8, on rank 0; None elsewhere and where samples are disabled."""
        if not self.world.writes:
            return None
        prompt, tokenizer = self.source.prompt(), self.model.tokenizer
        if prompt is None or tokenizer is None or not self.options.sample_tokens or not self.model.config.causal:
            return None
        n = self.options.sample_tokens
        out = self.model.generate([prompt], n, temperature=0.8, seed=self.options.seed, slide=True)[0]
        return tokenizer.decode(out.tolist())

    def save(self) -> None:
        """Saves a checkpoint, complete on return. Before the first evaluation, the newest checkpoint is the best."""
        if not math.isfinite(self.state.best_loss):
            self.state.best_step = self.state.step
        self.world.compare(replicated_state(self.optimizer), f"step {self.state.step}")
        values = {k: v for k, v in vars(self.state).items() if not isinstance(v, float) or math.isfinite(v)}
        if self.world.writes:
            kept = self.options.keep, self.options.keep_trajectory
            for line in save_checkpoint(self.run, self.write, self.optimizer, values, *kept):
                print(line, file=sys.stderr)
        elif isinstance(self.optimizer, ShardedAdamW):
            self.optimizer.send_moments()
        self.saved = self.state.step
        self.world.wait()


def replicated_state(optimizer: AdamW) -> dict[str, np.ndarray]:
    """The arrays that must be identical on all ranks: the trained weights, and the moments unless they are sharded."""
    model = optimizer.model
    weights = {name: to_numpy(model.params[name]) for name in sorted(model.trainable)}
    return weights if isinstance(optimizer, ShardedAdamW) else weights | optimizer.moments()


def set_dropout(model: Model, p: float) -> None:
    """Sets all dropout probabilities of a loaded model's configuration."""
    fields = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout")
    model.config = replace(model.config, **{name: p for name in fields if hasattr(model.config, name)})


def make_update(ranks: World, model: Model, options: LoopOptions) -> tuple[GradientAccumulator, AdamW]:
    """The gradient accumulator (over microbatches and ranks) and the optimizer."""
    settings: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "weight_decay": options.weight_decay}
    if ranks.size == 1:
        return GradientAccumulator(), AdamW(model, **settings)
    layout = BucketLayout.of(model, options.bucket_mb, ranks.size)
    if options.shard:
        return ReduceScatterGradients(ranks, layout, model), ShardedAdamW(model, ranks, layout, **settings)
    return AllReduceGradients(ranks, layout, model), AdamW(model, **settings)
