"""Supervised fine-tuning: batches of prompts and completions, with a loss on the completions only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onfoot.data.batches import ALL, FIRST, Batch, Place, Share
from onfoot.data.count import Count
from onfoot.data.example import Example
from onfoot.data.example_file import n_templated
from onfoot.data.packing import Rows
from onfoot.data.records import ReadLog
from onfoot.data.sft_examples import fit, read_examples, split_examples
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class SftSource:
    """Batches of shuffled rows for training, and of the same rows in the same order at each validation."""

    train: Rows
    held_out: Rows
    batch_size: int
    accumulate: int = 1
    eval_rows: int = 192
    about: str = ""  # report of the examples read, truncated and skipped
    begin: Place = FIRST

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]:
        n = self.batch_size * self.accumulate
        first = self.begin.of(step, n)
        return [self.train.sample(first + p.start, len(p)) for p in share.pieces(n, self.batch_size)]

    @property
    def unit(self) -> str:
        """What private training protects, one by one."""
        return "training example"

    @property
    def n_examples(self) -> int:
        """The number of training examples."""
        return len(self.train.examples)

    def batches_of(self, examples: np.ndarray) -> list[Batch]:
        """The training examples of these numbers, packed anew."""
        plan = self.train.pack_rows(examples)
        return [self.train.batch_of(plan[p.start : p.stop]) for p in ALL.pieces(len(plan), self.batch_size)]

    def example_numbers(self, step: int) -> list[np.ndarray]:
        """For each microbatch of a step, the index in `train.examples` of each token's example, (B, T); padding: −1."""
        n = self.batch_size * self.accumulate
        first = self.begin.of(step, n)
        return [self.train.example_numbers(first + p.start, len(p)) for p in ALL.pieces(n, self.batch_size)]

    def validation(self, share: Share = ALL) -> Iterable[Batch]:
        numbers = self.held_out.order(0)[: self.eval_rows]  # shuffled: the first packed rows are the longest
        numbers = numbers[share.of(len(numbers))]
        for begin in range(0, len(numbers), self.batch_size):
            yield self.held_out.batch(numbers[begin : begin + self.batch_size])

    def prompt(self) -> np.ndarray | None:
        """The prompt of the first validation example."""
        prompt = self.held_out.examples[0].prompt
        return prompt.astype(np.int64) if prompt.size else None

    def question(self) -> str:
        """The shortest first message of a user in the validation data, if that has conversations."""
        return min((e.question for e in self.held_out.examples if e.question), key=len, default="")

    def prompt_text(self, tokenizer: Tokenizer) -> str:
        """The text of the shortest prompt in the validation data, without special tokens."""
        prompts = (tokenizer.decode(e.prompt.tolist()) for e in self.held_out.examples)
        return min((p for p in prompts if p), key=len, default="")

    @property
    def rows(self) -> int:
        """Rows per epoch."""
        return len(self.train)

    def steps_for(self, epochs: float, private: bool = False) -> int:
        """The number of steps of `epochs` passes over the rows, or, in private training, over the examples."""
        if not epochs > 0:
            raise ValueError(f"epochs must be > 0, got {epochs}")
        count = self.n_examples if private else self.rows
        return max(1, math.ceil(round(epochs * count / (self.batch_size * self.accumulate), 9)))  # 1.1 · 10 is 11

    def fingerprint(self) -> str:
        """A hash of all token ids and target masks, so that a resumed run can detect changed data."""
        digest = hashlib.sha256()
        for rows in (self.train, self.held_out):
            digest.update(f"{len(rows.examples)} {rows.max_length} {rows.pack};".encode())
            for example in rows.examples:
                digest.update(f"{len(example)};".encode() + example.ids.tobytes() + example.learn.tobytes())
        return digest.hexdigest()

    def report(self) -> str:
        """How many examples were read, truncated, skipped and packed."""
        train, held_out = self.train.examples, self.held_out.examples
        shape = f"{self.rows:,} row{'s' * (self.rows != 1)} of up to {self.train.width} tokens"
        if self.train.pack:
            shape += f", {self.train.lengths.sum() / (self.rows * self.train.width):.0%} full"
        templated = n_templated(train) + n_templated(held_out)
        if templated:
            shape += (
                f"\n{templated:,} prompts and completions are in the model's chat template, as user and assistant "
                f"(--no-template: as they are)"
            )
        examples = "1 example" if len(train) == 1 else f"{len(train):,} examples"
        counts = f"{examples} for training, {len(held_out):,} for validation; {shape}"
        return f"{self.about}\n{counts}" if self.about else counts


def load_source(
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    max_length: int,
    batch_size: int,
    accumulate: int = 1,
    eval_rows: int = 192,
    on_long: str = "refuse",
    pack: bool = True,
    validation: float = 0.1,
    validation_files: Sequence[str | Path] = (),
    seed: int = 0,
    begin: Place = FIRST,
    skip_bad: bool = False,
    templated: bool = False,
    folder: Path | None = None,
    count: Count | None = None,
) -> SftSource:
    """A source of batches from files of examples, validated on `validation_files` or on a held-out fraction.

    The tokenized examples are in a temporary file, in `folder` if one is given. `count` tells how many are read.
    """

    def read(paths: Sequence[str | Path]) -> tuple[Sequence[Example], ReadLog]:
        log = ReadLog(skip_bad, count)
        return read_examples([Path(f) for f in paths], tokenizer, template, log, templated, folder), log

    separate = read(validation_files) if validation_files else None
    return source_of(
        *read(files), separate, max_length, batch_size, accumulate, eval_rows, on_long, pack, validation, seed, begin
    )


def source_of(
    examples: Sequence[Example],
    log: ReadLog,
    separate: tuple[Sequence[Example], ReadLog] | None,
    max_length: int,
    batch_size: int,
    accumulate: int,
    eval_rows: int,
    on_long: str,
    pack: bool,
    validation: float,
    seed: int,
    begin: Place = FIRST,
) -> SftSource:
    """A source of batches from examples, validated on `separate` ones or on a held-out fraction."""
    read = fit(examples, max_length, on_long)
    about = f"{log.report()}\n{read.report()}"
    if separate is None:
        train, held_out = split_examples(read.kept, validation, seed)
    else:
        others = fit(separate[0], max_length, on_long)
        about = f"{about}\nvalidation: {separate[1].report()}\n{others.report()}"
        train, held_out = read.kept, others.kept
    return SftSource(
        Rows(train, max_length, seed, pack),
        Rows(held_out, max_length, seed, pack),
        batch_size,
        accumulate,
        eval_rows,
        about,
        begin,
    )
