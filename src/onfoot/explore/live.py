"""The Live view: AdamW on one text for hundreds of steps, each of which can be looked at again.

Snapshots of the weights and moments are kept every `Training.every` steps; steps between them are computed again from
the snapshot before. A step is a function of the learning rates up to it, so that they identify it in a link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.explore.copies import LORA_ALPHA, LORA_RANK, copy_of, lora_changes, merged
from onfoot.explore.jobs import progress
from onfoot.explore.one_step import FIRST, MAX_LR
from onfoot.explore.study_context import StudyContext
from onfoot.ops.attention import softmax
from onfoot.ops.cross_entropy import IGNORE, log_sum_exp
from onfoot.train.optimizer import AdamW

if TYPE_CHECKING:
    from onfoot.models.model import Model

MAX_STEPS = 1000
MAX_LARGE_STEPS = 200  # of a model whose weights are frozen
MAX_CHUNK = 100  # new steps per request, of a small model
WORK = 1e10  # parameters × tokens × steps of a request: a few seconds
MAX_CHANGES = 64  # of the learning rate
SNAPSHOT_BYTES = 256 * 2**20  # of all snapshots together
FEWEST_BETWEEN = 10  # steps from one snapshot to the next
EXPORTED_STEPS = 100
PREDICTIONS = 3

Rates = tuple[tuple[int, float], ...]  # (first step, learning rate from it on)
FIRST_RATES: Rates = ((0, FIRST[0]),)


def read_rates(text: str) -> Rates:
    """Learning rates from a string: "0:0.001,50:0.01" is 0.001 from step 0 on, and 0.01 from step 50 on."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        rates = tuple((int(step), float(rate)) for step, rate in pairs)
    except ValueError:
        raise ValueError(f"rates must be like 0:0.001,50:0.01, got {text[:80]!r}") from None
    starts = [step for step, _ in rates]
    if starts[0] != 0 or starts[-1] >= MAX_STEPS or any(a >= b for a, b in pairwise(starts)):
        raise ValueError(f"rates must begin at step 0 and increase up to step {MAX_STEPS - 1}, got {text[:80]!r}")
    if len(rates) > MAX_CHANGES:
        raise ValueError(f"at most {MAX_CHANGES} learning rates, got {len(rates)}")
    for _, rate in rates:
        if not 0 < rate <= MAX_LR:
            raise ValueError(f"lr must be > 0 and <= {MAX_LR}, got {rate}")
    return rates


def rates_text(rates: Rates) -> str:
    return ",".join(f"{step}:{rate!r}" for step, rate in rates)


def rate_at(rates: Rates, step: int) -> float:
    """The learning rate of the update from `step` to `step` + 1."""
    return next(rate for start, rate in reversed(rates) if start <= step)


def check_step(step: int, limit: int) -> None:
    if not 0 <= step <= limit:
        raise ValueError(f"step must be between 0 and {limit}, got {step}")


class Snapshot(NamedTuple):
    params: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]


class Predictions(NamedTuple):
    """The probabilities of the next token (T, V), and each token's loss (T,), 0 without a target."""

    probabilities: np.ndarray
    losses: np.ndarray


def predict(model: Model, tokens: np.ndarray, targets: np.ndarray) -> Predictions:
    logits, counts = np.asarray(model.logits(tokens))[0], targets[0] != IGNORE  # (T, V), (T,)
    picked = logits[np.arange(len(logits)), np.where(counts, targets[0], 0)]
    return Predictions(softmax(logits), np.where(counts, log_sum_exp(logits) - picked, 0.0))


class Training:
    """AdamW steps on one text, from the study's model on. `losses[t]` is the loss after t steps.

    Frozen weights cannot move: then LoRA layers train, and a snapshot has only these.
    """

    def __init__(self, m: StudyContext) -> None:
        self.start, self.tokens, self.targets, self.divisor = m.model, m.tokens, m.targets, m.divisor
        self.m, self.lora = m, m.frozen
        self.most_steps = MAX_LARGE_STEPS if self.lora else MAX_STEPS
        self.chunk = min(MAX_CHUNK, max(int(WORK / (m.model.n_params * m.n_tokens)), 1))
        self.rates = FIRST_RATES
        self.losses = [m.trace.loss]
        self.ended: int | None = None  # the last step before the loss was not finite
        self.snapshots: dict[int, Snapshot] = {}
        self.differences: dict[int, dict[str, Any]] = {}  # by step, so that one can go back at once
        self.first_predictions = predict(m.model, m.tokens, m.targets)
        self._restore(0)
        snapshot_bytes = 3 * 8 * self.model.n_trainable  # weights and both moments, float64
        self.every = max(FEWEST_BETWEEN, math.ceil(self.most_steps * snapshot_bytes / SNAPSHOT_BYTES))
        self.most_bytes = self.most_steps // self.every * snapshot_bytes

    def follow(self, rates: Rates) -> None:
        """Sets the learning rates. The steps from the first other rate on are dropped."""
        if rates == self.rates:
            return
        changes = {start for start, _ in (*rates, *self.rates)}
        kept = min((step for step in changes if rate_at(rates, step) != rate_at(self.rates, step)), default=MAX_STEPS)
        self.rates = rates
        if kept >= len(self.losses) and (self.ended is None or kept > self.ended):
            return
        del self.losses[kept + 1 :]
        self.differences = {step: value for step, value in self.differences.items() if step <= kept}
        self.snapshots = {step: value for step, value in self.snapshots.items() if step <= kept}
        self.ended = None
        if self._at > kept:
            self._restore(self._snapshot_before(kept))

    def go_to(self, step: int) -> Model:
        """The model after `step` steps, or after the last one whose loss is finite. The next call changes it."""
        to = step if self.ended is None else min(step, self.ended)
        nearest = self._snapshot_before(to)
        if not nearest <= self._at <= to:
            self._restore(nearest)
        from_step = self._at
        while self._at < to:
            progress("training steps", self._at - from_step, to - from_step)
            if not self._take_step():
                return self.go_to(step)
        return self.model

    def _snapshot_before(self, step: int) -> int:
        return max((at for at in self.snapshots if at <= step), default=0)

    def _restore(self, step: int) -> None:
        self._at = step
        self._next: dict[str, np.ndarray] | None = None  # the gradients at this step, if they are known
        if step == 0:
            self.model = copy_of(self.start)
            if self.lora:
                self.model.add_lora(r=min(LORA_RANK, self.start.config.n_embd), alpha=LORA_ALPHA)
            self.optimizer = AdamW(self.model, lr=FIRST[0])
            return
        snapshot = self.snapshots[step]
        for name, value in snapshot.params.items():
            self.model.params[name][...] = value
        self.optimizer.restore(snapshot.moments, step)

    def _take_step(self) -> bool:
        """Takes a step; returns False if the loss after it is not finite."""
        with np.errstate(all="ignore"):  # a rate that is too large: the loss says so
            grads = self._loss_and_grads()[1] if self._next is None else self._next
            self.optimizer.step(grads, lr=rate_at(self.rates, self._at))
            self._at, self._next = self._at + 1, None
            if self._at == len(self.losses):
                loss, self._next = self._loss_and_grads()
                if not math.isfinite(loss):
                    self.ended = self._at - 1
                    return False
                self.losses.append(loss)
        if self._at % self.every == 0 and self._at not in self.snapshots:
            params = {name: self.model.params[name].copy() for name in self.model.trainable}
            moments = {name: value.copy() for name, value in self.optimizer.moments().items()}
            self.snapshots[self._at] = Snapshot(params, moments)
        return True

    def _loss_and_grads(self) -> tuple[float, dict[str, np.ndarray]]:
        return self.model.loss_and_grads(self.tokens, self.targets, divisor=self.divisor)

    def answer(self, rates: str, step: int, known: int) -> dict[str, Any]:
        """The losses from `known` on up to `step`, and how the model differs there from step 0.

        Of a step far ahead, only part of the way is computed: the page asks again from the step that it gets.
        """
        check_step(step, self.most_steps)
        self.follow(read_rates(rates))
        at = min(step, len(self.losses) - 1 + self.chunk)
        if at not in self.differences:
            model = self.go_to(at)
            at = at if self.ended is None else min(at, self.ended)
            now = predict(model, self.tokens, self.targets)
            self.differences[at] = difference(self._moved(model), now, self.first_predictions)
        return {
            "rates": [list(pair) for pair in self.rates],
            "step": at,
            "known": known,
            "losses": self.losses[known : max(at, known) + 1],
            "ended": self.ended,
            "most_steps": self.most_steps,
            "every": self.every,
            "most_bytes": self.most_bytes,
            "lora": {"rank": LORA_RANK, "trainable": self.model.n_trainable} if self.lora else None,
            **self.differences[at],
        }

    def _moved(self, model: Model) -> list[Moved]:
        """How far each parameter has moved."""
        if self.lora:
            return [Moved(name, change, self.m.weight_norm(name)) for name, change in lora_changes(model).items()]
        return moved_from(self.start, model)

    def model_at(self, rates: str, step: int) -> Model:
        """A copy of the model after `step` steps."""
        check_step(step, self.most_steps)
        self.follow(read_rates(rates))
        if step - (len(self.losses) - 1) > self.chunk:
            raise ValueError(f"step {step} is not computed yet; play up to it first")
        trained = self.go_to(step)
        model = merged(self.start, trained) if self.lora else copy_of(trained)
        model.tokenizer = self.start.tokenizer
        return model

    def exported(self) -> dict[str, Any]:
        """What an exported page has: the losses of the first steps, and the last of them compared with step 0."""
        return self.answer(rates_text(FIRST_RATES), EXPORTED_STEPS, 0)


class Moved(NamedTuple):
    """How far a parameter has moved, and its norm before."""

    name: str
    change: float
    weight: float


def moved_from(start: Model, model: Model) -> list[Moved]:
    found = []
    for name, before in start.params.items():
        old = np.asarray(before)
        change, norm = (float(np.linalg.norm(x)) for x in (np.asarray(model.params[name]) - old, old))
        found.append(Moved(name, change, norm))
    return found


def difference(moved: list[Moved], now: Predictions, first: Predictions) -> dict[str, Any]:
    """How the weights and the predictions of a model differ from those of the model that training started from."""
    parameters = [{**one._asdict(), "ratio": one.change / one.weight if one.weight else None} for one in moved]
    tokens = []
    for t, row in enumerate(now.probabilities):
        best = np.argsort(-row, kind="stable")[:PREDICTIONS]
        tokens.append(
            {
                "loss": float(now.losses[t]),
                "first_loss": float(first.losses[t]),
                "best": [{"id": int(i), "probability": float(row[i])} for i in best],
                "first_best": int(first.probabilities[t].argmax()),
            }
        )
    return {"parameters": parameters, "tokens": tokens}


def whole(query: Mapping[str, str], name: str) -> int:
    """An integer of a request."""
    try:
        return int(query[name])
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {query[name][:40]!r}") from None
