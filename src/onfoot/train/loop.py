"""The training loop: steps, evaluations, checkpoints, and what happens when it is interrupted.

It knows nothing of where batches come from or what a checkpoint holds: `Source` gives the one, `write` the other.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np

from onfoot.arrays import Array
from onfoot.models.inputs import count_targets
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.checkpoint import checkpoint_folder, read_state, restore_optimizer, save_checkpoint
from onfoot.train.log import Log, draw_losses
from onfoot.train.optimizer import AdamW, clip, global_norm
from onfoot.train.options import LoopOptions
from onfoot.train.progress import Reporter, duration
from onfoot.train.schedule import learning_rate
from onfoot.train.watch import invariants


class Batch(NamedTuple):
    tokens: np.ndarray  # (B, T)
    targets: np.ndarray  # (B, T)
    segments: np.ndarray | None = None  # (B, T)


class Source(Protocol):
    """Where batches come from. The same step always has the same batches: resuming needs no other state."""

    def microbatches(self, step: int) -> list[Batch]: ...

    def validation(self) -> Iterable[Batch]: ...

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
        self.bigram = bigram  # an entropy to draw beside the losses
        self.optimizer = AdamW(model, options.lr, options.betas, weight_decay=options.weight_decay)
        self.state = State()
        self.log = Log(run / "log.jsonl")
        self.validation_loss: float | None = None

    def restore(self, checkpoint: Path | None) -> None:
        """Goes back to where a checkpoint left the run; None: to its beginning. The weights are the caller's."""
        if checkpoint is None:
            self.log.path.unlink(missing_ok=True)
            return
        restore_optimizer(checkpoint, self.optimizer)
        saved = read_state(checkpoint)
        self.state = State(**{name: saved[name] for name in vars(State()) if name in saved})
        self.log.resume(self.state.step)

    def train(self) -> Outcome:
        """Runs to the end, or until interrupted; then the run has been saved."""
        options, state = self.options, self.state
        begun = time.monotonic() - state.seconds
        with _interrupts() as interrupted, Reporter(options.steps, state.step) as report:
            speed = 0.0
            while state.step < options.steps and not interrupted():
                lr = learning_rate(state.step, options.steps, options.lr, options.warmup, options.schedule)
                tick = time.monotonic()
                loss, norm, n_tokens = self.step(lr)
                rate = n_tokens / (time.monotonic() - tick)
                speed = rate if speed == 0 else 0.9 * speed + 0.1 * rate
                state.step += 1
                state.seconds = time.monotonic() - begun
                last = state.step == options.steps
                self.log.append(step=state.step, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=round(rate))
                figures = {"loss": f"{loss:.4f}"}
                if self.validation_loss is not None:
                    figures["val"] = f"{self.validation_loss:.4f}"
                figures |= {"lr": f"{lr:.2e}", "norm": f"{norm:.2f}", "tokens/s": f"{speed:,.0f}"}
                report.update(state.step, figures)
                improved = False
                if last or state.step % options.eval_every == 0:
                    improved = self.evaluate(report, show_sample=not last)
                if last or improved or state.step % options.save_every == 0:
                    self.save()
            if interrupted() and not checkpoint_folder(self.run, state.step).is_dir():
                self.save()
        draw_losses(self.log.read(), self.run / "loss.png", self.bigram)
        return Outcome(state, checkpoint_folder(self.run, state.step), self.validation_loss, state.step < options.steps)

    def step(self, lr: float) -> tuple[float, float, int]:
        """One step over its microbatches: the mean loss, the gradients' norm before clipping, and the tokens."""
        batches = self.source.microbatches(self.state.step)
        divisor = count_targets(np.concatenate([b.targets.reshape(-1) for b in batches]))  # of the whole step
        loss, grads = 0.0, dict[str, Array]()
        for i, batch in enumerate(batches):
            seed = int(np.random.SeedSequence([self.options.seed, self.state.step, i]).generate_state(1)[0])
            part, part_grads = self.model.loss_and_grads(
                batch.tokens, batch.targets, divisor=divisor, segments=batch.segments, dropout_seed=seed
            )
            loss += part
            for name, grad in part_grads.items():
                grads[name] = grads[name] + grad if name in grads else grad
        norm = clip(grads, self.options.clip) if self.options.clip else global_norm(grads)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(
                f"step {self.state.step + 1}: the loss is {loss} and the gradients' norm {norm}; the run stops "
                f"here and nothing was overwritten. Try a lower learning rate (this was {lr:.2e}) or clipping, and go "
                f"on from the last checkpoint in {self.run / 'checkpoints'}"
            )
        self.optimizer.step(grads, lr)
        return loss, norm, sum(b.tokens.size for b in batches)

    def evaluate(self, report: Reporter, show_sample: bool) -> bool:
        """The validation loss, the invariants and a sample; whether the loss is the best so far."""
        total, n_targets = 0.0, 0
        first = None
        for batch in self.source.validation():
            first = first or batch
            n = int((batch.targets != IGNORE).sum())
            total += self.model.loss(batch.tokens, batch.targets, divisor=1.0, segments=batch.segments) if n else 0.0
            n_targets += n
        self.validation_loss = total / n_targets
        record: dict[str, Any] = {"step": self.state.step, "val_loss": self.validation_loss}
        said = f"step {self.state.step}: validation loss {self.validation_loss:.4f}"
        if self.options.watch and first is not None:
            record["invariants"] = invariants(self.model, first.tokens[:2], first.targets[:2])
            said += "  " + "  ".join(f"{name} {value:.1e}" for name, value in record["invariants"].items())
        report.say(said + f"  ({duration(self.state.seconds)})")
        sample = self.sample() if show_sample else None
        if sample is not None:
            record["sample"] = sample
            report.say("  " + sample.replace("\n", "\n  "))
        self.log.append(**record)
        if self.validation_loss < self.state.best_loss:
            self.state.best_loss, self.state.best_step = self.validation_loss, self.state.step
            return True
        return False

    def sample(self) -> str | None:
        """Text that the model goes on with, at temperature 0.8."""
        prompt, tokenizer = self.source.prompt(), self.model.tokenizer
        if prompt is None or tokenizer is None or not self.options.sample_tokens or not self.model.config.causal:
            return None
        n = self.options.sample_tokens
        out = self.model.generate([prompt], n, temperature=0.8, seed=self.options.seed, slide=True)[0]
        return tokenizer.decode(out.tolist())

    def save(self) -> None:
        """A checkpoint of this moment. A run that was never evaluated counts as its own best."""
        if not math.isfinite(self.state.best_loss):
            self.state.best_step = self.state.step
        values = {k: v for k, v in vars(self.state).items() if not isinstance(v, float) or math.isfinite(v)}
        save_checkpoint(self.run, self.write, self.optimizer, values, self.options.keep)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a question that the loop asks; a second one acts at once."""
    asked = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, old in before.items():
            signal.signal(number, old)
