"""The training loop: steps, evaluations, checkpoints, and what happens when it is interrupted.

It knows nothing of where batches come from or what a checkpoint holds: `Source` gives the one, `write` the other.
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

from onfoot.data.batches import ALL, Batch, Share
from onfoot.formats.run_folder import checkpoint_folder, read_state
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.buckets import AllReduceGradients, GradientAccumulator, ReduceScatterGradients
from onfoot.train.checkpoint import restore_optimizer, save_checkpoint
from onfoot.train.interrupts import asked_to_stop
from onfoot.train.invariants import invariants
from onfoot.train.lock import take_lock
from onfoot.train.log import Log, draw_losses
from onfoot.train.optimizer import AdamW
from onfoot.train.options import LoopOptions
from onfoot.train.parallel import World, world
from onfoot.train.progress import Reporter, duration
from onfoot.train.schedule import learning_rate
from onfoot.train.shard import ShardedAdamW
from onfoot.train.step import Part, one_batch, several
from onfoot.train.vector import BucketLayout


class Source(Protocol):
    """Where batches come from. The same step always has the same batches: resuming needs no other state.

    Of several ranks each asks for its share of the rows only.
    """

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]: ...

    def validation(self, share: Share = ALL) -> Iterable[Batch]: ...

    def prompt(self) -> np.ndarray | None:
        """The beginning of the samples that an evaluation shows, (T,), or None."""

    def report(self) -> str:
        """What there is to train and validate on, in a line or two."""


@dataclass
class State:
    """Where a run stands: all that a checkpoint needs besides the weights and the optimizer."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """How a run ended."""

    state: State
    checkpoint: Path
    validation_loss: float | None
    interrupted: bool


class Trainer:
    """One run: a model, its optimizer, its data, and the folder it lives in."""

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
        self.bigram = bigram  # an entropy to draw beside the losses
        self.world = world()
        self.ours = () if self.world.size == 1 else (self.world.share,)  # what a source is asked for
        self.sums, self.optimizer = make_update(self.world, model, options)
        self.state = State()
        self.saved: int | None = None  # the step of the last checkpoint
        self.log = Log(run / "log.jsonl", self.world.writes)
        self.validation_loss: float | None = None
        self.lock: FileLock | None = None  # of the folder, from when it was opened
        self.complaints: list[str] = []  # what was found wrong when it was

    def restore(self, checkpoint: Path | None) -> None:
        """Goes back to where a checkpoint left the run; None: to its beginning. The weights are the caller's."""
        if checkpoint is None:
            if self.world.writes:
                self.log.path.unlink(missing_ok=True)
            return
        restore_optimizer(checkpoint, self.optimizer)
        saved = read_state(checkpoint)
        self.state = State(**{name: saved[name] for name in vars(State()) if name in saved})
        self.saved = self.state.step
        self.complaints = self.log.resume(self.state.step)

    def train(self) -> Outcome:
        """Runs to the end, or until interrupted; then the run has been saved."""
        with self.world.guard(self.run, self.options.command), self._alone():
            return self._train()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps a second process from training the same run at the same time."""
        if self.world.writes and (self.lock is None or not self.lock.is_locked):
            self.lock = take_lock(self.run)
        try:
            yield
        finally:
            if self.lock is not None:
                self.lock.release(force=True)

    def _train(self) -> Outcome:
        options, state = self.options, self.state
        begun = time.monotonic() - state.seconds
        with asked_to_stop() as interrupted, Reporter(options.steps, state.step) as report:
            speed, stopped = 0.0, False
            while state.step < options.steps and not (stopped := self.world.any(interrupted())):
                lr = learning_rate(state.step, options.steps, options.lr, options.warmup, options.schedule)
                tick = time.monotonic()
                loss, norm, n_tokens = self.step(lr)
                seconds = time.monotonic() - tick
                rate = n_tokens / seconds
                waited = {"waiting": round(self.sums.times.waiting / seconds, 4)} if self.world.size > 1 else {}
                speed = rate if speed == 0 else 0.9 * speed + 0.1 * rate
                state.step += 1
                state.seconds = time.monotonic() - begun
                last = state.step == options.steps
                self.log.append(step=state.step, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=round(rate), **waited)
                figures = {"loss": f"{loss:.4f}"}
                if self.validation_loss is not None:
                    figures["val"] = f"{self.validation_loss:.4f}"
                figures |= {"lr": f"{lr:.2e}", "norm": f"{norm:.2f}", "tokens/s": f"{speed:,.0f}"}
                if waited:
                    figures["waiting"] = f"{waited['waiting']:.0%}"
                report.update(state.step, figures)
                improved = False
                if last or state.step % options.eval_every == 0:
                    improved = self.evaluate(report, show_sample=not last)
                if last or improved or state.step % options.save_every == 0:
                    self.save()
            if stopped and self.saved != state.step:
                self.save()
        if self.world.writes:
            draw_losses(self.log.read(), self.run / "loss.png", self.bigram)
        return Outcome(state, checkpoint_folder(self.run, state.step), self.validation_loss, state.step < options.steps)

    def step(self, lr: float) -> tuple[float, float, int]:
        """One step over its microbatches: the mean loss, the gradients' norm before clipping, and the tokens."""
        batches = self.source.microbatches(self.state.step, *self.ours)
        n_targets = sum(int((b.targets != IGNORE).sum()) for b in batches)
        divisor, n_tokens = self.world.sum(n_targets, sum(b.tokens.size for b in batches))  # of the whole step
        if divisor == 0:
            where = f"step {self.state.step + 1}"
            raise self.world.agreed(ValueError(f"{where}: none of its {n_tokens:.0f} tokens has a target that counts"))
        parts = [Part(*batch, self.dropout_seed(i)) for i, batch in enumerate(batches)]
        if len(parts) == 1 and self.world.size == 1 and not self.options.clip:
            loss, norm = one_batch(self.model, self.optimizer, parts[0], int(divisor), lr, self._diverged)
        else:
            how = lr, self.options.clip, self._diverged, self.sums, self.world
            loss, norm = several(self.model, self.optimizer, parts, int(divisor), *how)
        return loss, norm, int(n_tokens)

    def _diverged(self, what: str, changed: bool = False) -> ValueError:
        memory = "some weights in memory have had this step already, but " if changed else ""
        return ValueError(
            f"step {self.state.step + 1}: {what}; the run stops here; {memory}nothing was overwritten. Begin a new run "
            f"with a lower --lr (this was {self.options.lr:g}) or a smaller --clip"
        )

    def dropout_seed(self, i: int) -> int:
        """The seed of microbatch i of this step; of several ranks, each has its own."""
        where = [self.options.seed, self.state.step, i, *([self.world.rank] if self.world.rank else [])]
        return int(np.random.SeedSequence(where).generate_state(1)[0])

    def evaluate(self, report: Reporter, show_sample: bool) -> bool:
        """The validation loss, the invariants and a sample; whether the loss is the best so far."""
        total, n_targets = 0.0, 0
        first = None
        for batch in self.source.validation(*self.ours):
            first = first or batch
            n = int((batch.targets != IGNORE).sum())
            total += self.model.loss(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments) if n else 0.0
            n_targets += n
        total, n_all = self.world.sum(total, n_targets)
        self.validation_loss = total / n_all
        if not math.isfinite(self.validation_loss):
            raise self.world.agreed(self._diverged(f"the validation loss is {self.validation_loss}"))
        record: dict[str, Any] = {"step": self.state.step, "val_loss": self.validation_loss}
        said = f"step {self.state.step}: validation loss {self.validation_loss:.4f}"
        if self.options.watch and first is not None and self.world.writes:
            record["invariants"] = invariants(self.model, first.tokens[:2], first.targets[:2])
            said += "  " + "  ".join(f"{name} {value:.1e}" for name, value in record["invariants"].items())
        report.say(said + f"  ({duration(self.state.seconds)})")
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
        """Text that the model goes on with, at temperature 0.8; rank 0 shows it."""
        if not self.world.writes:
            return None
        prompt, tokenizer = self.source.prompt(), self.model.tokenizer
        if prompt is None or tokenizer is None or not self.options.sample_tokens or not self.model.config.causal:
            return None
        n = self.options.sample_tokens
        out = self.model.generate([prompt], n, temperature=0.8, seed=self.options.seed, slide=True)[0]
        return tokenizer.decode(out.tolist())

    def save(self) -> None:
        """A checkpoint of this moment, complete on return. A run that was never evaluated counts as its own best."""
        if not math.isfinite(self.state.best_loss):
            self.state.best_step = self.state.step
        self.world.compare(self.optimizer.everything(), f"step {self.state.step}")
        values = {k: v for k, v in vars(self.state).items() if not isinstance(v, float) or math.isfinite(v)}
        if self.world.writes:
            for line in save_checkpoint(self.run, self.write, self.optimizer, values, self.options.keep):
                print(line, file=sys.stderr)
        else:
            self.optimizer.send_moments()
        self.saved = self.state.step
        self.world.wait()


def set_dropout(model: Model, p: float) -> None:
    """Makes a loaded model drop as the run's options say, whatever its own configuration did."""
    places = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout")
    model.config = replace(model.config, **{name: p for name in places if hasattr(model.config, name)})


def make_update(ranks: World, model: Model, options: LoopOptions) -> tuple[GradientAccumulator, AdamW]:
    """How gradients are summed over microbatches and ranks, and the optimizer that the sums go to."""
    settings: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "weight_decay": options.weight_decay}
    if ranks.size == 1:
        return GradientAccumulator(), AdamW(model, **settings)
    layout = BucketLayout.of(model, options.bucket_mb, ranks.size)
    if options.shard:
        return ReduceScatterGradients(ranks, layout, model), ShardedAdamW(model, ranks, layout, **settings)
    return AllReduceGradients(ranks, layout, model), AdamW(model, **settings)
