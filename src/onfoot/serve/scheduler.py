"""Decodes all requests together: one thread owns the model, and a step computes one token of every running answer.

An answer joins when a slot of the KV cache is free, and leaves when it is finished. Its logits and its random numbers
do not depend on the others. A slot keeps its tokens until it is needed: a prompt that begins with them, as the next
turn of a conversation does, is computed from there on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onfoot.generate.sampling import Sampling, next_token
from onfoot.generate.slots import Slot, SlotCache
from onfoot.models.model import Model
from onfoot.serve.answer import Answer, Piece

CHUNK = 256  # tokens of prompts that are computed between two tokens of the running answers
LAST = 32  # tokens: each part of a prompt is at least as long, so that it is computed as in one piece (bitwise)
REUSE = 16  # tokens: a shorter common prefix is computed again


class QueueFullError(Exception):
    """Too many answers are waiting."""


class ShutdownError(Exception):
    """The server is shutting down."""


@dataclass(eq=False)
class Job:
    """One answer to generate; `on_piece` is called from the model's thread."""

    prompt: list[int]
    answer: Answer
    sampling: Sampling
    rng: np.random.Generator
    on_piece: Callable[[Piece], None]
    cancelled: bool = False


@dataclass(eq=False)
class Row:
    """A job in its slot."""

    job: Job
    slot: Slot
    started: bool = False  # whether the reused prefix is in the slot
    n_reused: int = 0
    feed: int | None = None  # the next token to append; None while the prompt is computed


@dataclass
class Stats:
    """Counters since the start."""

    requests: int = 0  # answers that were started
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts, not computed again
    generated_tokens: int = 0
    steps: int = 0  # of the batch
    largest_batch: int = 0


class Scheduler:
    """Runs jobs on one model, at most `max_batch` at the same time; others wait in a queue."""

    def __init__(self, model: Model, max_batch: int = 8, context: int | None = None, max_queue: int = 64) -> None:
        self.context = context or model.config.n_positions
        self.max_queue, self.stats = max_queue, Stats()
        self.cache = SlotCache(model, max_batch, self.context)
        self._recent = list(self.cache.slots)  # least recently used first
        self._waiting: deque[Job] = deque()
        self._rows: list[Row] = []  # in the order of their arrival
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="onfoot-serve", daemon=True)

    def start(self) -> None:
        """Starts the model's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step; all answers end with an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout)

    @property
    def n_running(self) -> int:
        """Answers that have a slot."""
        return len(self._rows)

    @property
    def n_waiting(self) -> int:
        """Answers in the queue."""
        return len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Adds the answers of one request to the queue."""
        with self._changed:
            if self._stopping:
                raise ShutdownError("the server is shutting down")
            if len(self._waiting) >= self.max_queue:
                raise QueueFullError(f"{len(self._waiting)} answers are waiting, the limit is {self.max_queue}")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Frees the slots of these jobs before the next step; nothing happens to those that are finished."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    # The model's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._rows):
                    self._changed.wait()
                if self._stopping:
                    break
                self._admit()
            try:
                self._compute_prompts()
                self._decode()
            except Exception as error:  # the other requests must still be answered
                self._fail(self._rows, f"{type(error).__name__}: {error}")
        self._fail([*self._rows], "the server is shutting down")
        for job in self._waiting:
            job.on_piece(Piece("", finish_reason="error", error="the server is shutting down"))
        self._waiting.clear()

    def _admit(self) -> None:
        """Removes cancelled jobs, and gives a free slot to each waiting one, as long as there are any."""
        for row in [row for row in self._rows if row.job.cancelled]:
            self._leave(row)
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        busy = {row.slot.index for row in self._rows}
        free = [slot for slot in self._recent if slot.index not in busy]
        while free and self._waiting:
            job = self._waiting.popleft()
            slot = max(free, key=lambda slot: reusable(slot, job.prompt))  # of equal ones, the least recently used
            free.remove(slot)
            self._rows.append(Row(job, slot))
            self.stats.requests += 1

    def _leave(self, row: Row) -> None:
        self._rows.remove(row)
        self._recent.remove(row.slot)
        self._recent.append(row.slot)

    def _fail(self, rows: Sequence[Row], message: str) -> None:
        for row in list(rows):
            row.slot.truncate(0)
            self._leave(row)
            row.job.on_piece(Piece("", finish_reason="error", error=message))

    def _compute_prompts(self) -> None:
        """Computes CHUNK tokens of the prompts, one prompt after the other."""
        budget = CHUNK
        for row in [row for row in self._rows if row.feed is None]:
            if budget < LAST:
                return
            if not row.started:
                self._reuse(row)
            prompt, done = row.job.prompt, row.slot.length
            rest = len(prompt) - done
            if rest == 1 and done:
                row.feed = prompt[-1]
                continue
            n = rest if rest <= budget + LAST else budget
            logits = self.cache.prefill(row.slot, prompt[done : done + n])
            budget -= n
            if n == rest:
                self._sample(row, logits)

    def _reuse(self, row: Row) -> None:
        """Starts a row with the longest prefix of its prompt that is in any slot."""
        prompt, slot = row.job.prompt, row.slot
        source = max((slot, *self._recent), key=lambda other: reusable(other, prompt))
        n = reusable(source, prompt)
        if source is slot:
            slot.truncate(n)
        else:
            slot.copy_from(source, n)
        row.started, row.n_reused = True, n
        self.stats.prompt_tokens += len(prompt)
        self.stats.reused_tokens += n

    def _decode(self) -> None:
        """One more token of every answer whose prompt is in the cache."""
        rows = [row for row in self._rows if row.feed is not None]
        if not rows:
            return
        logits = self.cache.next_logits([row.slot for row in rows], [row.feed for row in rows if row.feed is not None])
        self.stats.steps += 1
        self.stats.largest_batch = max(self.stats.largest_batch, len(rows))
        for row, values in zip(rows, logits, strict=True):
            self._sample(row, values)

    def _sample(self, row: Row, logits: np.ndarray) -> None:
        job = row.job
        seen = np.array([*job.prompt, *job.answer.tokens] if job.sampling.repetition_penalty != 1 else [], np.int64)
        try:
            row.feed = next_token(logits, seen, job.sampling, job.rng)
        except ValueError as error:  # logits that are not finite
            self._fail([row], str(error))
            return
        piece = job.answer.add(row.feed, logits)
        piece.n_reused = row.n_reused
        self.stats.generated_tokens += 1
        if piece.finish_reason is not None:
            self._leave(row)
        if piece.text or piece.logprobs or piece.finish_reason is not None:
            job.on_piece(piece)


def reusable(slot: Slot, prompt: Sequence[int]) -> int:
    """The number of tokens at the start of a prompt that are in a slot; the last token's logits are always computed."""
    n = 0
    for a, b in zip(slot.tokens, prompt[:-1], strict=False):
        if a != b:
            break
        n += 1
    return n if n >= REUSE else 0
