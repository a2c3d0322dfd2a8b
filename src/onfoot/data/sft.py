"""Supervised fine-tuning: batches of prompts and completions, where only the completions are learnt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onfoot.data.batches import ALL, Batch, Share
from onfoot.data.packing import Rows
from onfoot.data.sft_examples import fit, read_examples, split_examples
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class SftSource:
    """Batches of rows for training, the same rows in the same order at each validation."""

    train: Rows
    held_out: Rows
    batch_size: int
    accumulate: int = 1
    eval_rows: int = 192
    about: str = ""  # what was read, and what of it was cut or left out

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]:
        n = self.batch_size * self.accumulate
        return [self.train.sample(step * n + p.start, len(p)) for p in share.pieces(n, self.batch_size)]

    def validation(self, share: Share = ALL) -> Iterable[Batch]:
        numbers = self.held_out.order(0)[: self.eval_rows]  # shuffled: the first rows of a packing are the longest
        numbers = numbers[share.of(len(numbers))]
        for begin in range(0, len(numbers), self.batch_size):
            yield self.held_out.batch(numbers[begin : begin + self.batch_size])

    def prompt(self) -> np.ndarray | None:
        """The prompt of the first validation example."""
        prompt = self.held_out.examples[0].prompt
        return prompt.astype(np.int64) if prompt.size else None

    @property
    def rows(self) -> int:
        """The number of rows an epoch."""
        return len(self.train)

    @property
    def targets_per_epoch(self) -> int:
        """The number of tokens that are learnt an epoch."""
        return sum(e.n_targets for e in self.train.examples)

    def steps_for(self, epochs: float) -> int:
        """The steps after which every row has been seen `epochs` times, rounded up."""
        if not epochs > 0:
            raise ValueError(f"epochs={epochs}: a number above 0 is needed")
        return math.ceil(round(epochs * self.rows / (self.batch_size * self.accumulate), 9))  # 1.1 · 10 is 11

    def fingerprint(self) -> str:
        """A hash of every id and of what is learnt: a resumed run can tell whether its data is still the same."""
        digest = hashlib.sha256()
        for rows in (self.train, self.held_out):
            digest.update(f"{len(rows.examples)} {rows.max_length} {rows.pack};".encode())
            for example in rows.examples:
                digest.update(f"{len(example)};".encode() + example.ids.tobytes() + example.learn.tobytes())
        return digest.hexdigest()

    def report(self) -> str:
        """What was read, what of it was cut or left out, and how it was packed."""
        train, held_out = self.train.examples, self.held_out.examples
        shape = f"{self.rows:,} rows of up to {self.train.width} tokens"
        if self.train.pack:
            shape += f", {sum(map(len, train)) / (self.rows * self.train.width):.0%} full"
        both = f"{len(train):,} examples for training, {len(held_out):,} for validation; {shape}"
        return f"{self.about}\n{both}" if self.about else both


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
) -> SftSource:
    """The examples of .jsonl files as a source of batches; `validation_files` take the place of a share of them."""
    read = fit(read_examples([Path(f) for f in files], tokenizer, template), max_length, on_long)
    about = read.report()
    if validation_files:
        apart = fit(read_examples([Path(f) for f in validation_files], tokenizer, template), max_length, on_long)
        about = f"{about}\nvalidation: {apart.report()}"
        train, held_out = read.kept, apart.kept
    else:
        train, held_out = split_examples(read.kept, validation, seed)
    return SftSource(
        Rows(train, max_length, seed, pack),
        Rows(held_out, max_length, seed, pack),
        batch_size,
        accumulate,
        eval_rows,
        about,
    )
