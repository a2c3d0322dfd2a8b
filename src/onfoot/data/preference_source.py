"""Preference tuning: the pairs of each step, with the log-probabilities that the reference gives them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onfoot.data.batches import ALL, FIRST, Batch, Place, Share
from onfoot.data.example import Example
from onfoot.data.example_file import StoredPairs
from onfoot.data.sft_examples import fit, nothing_left
from onfoot.data.windows import Windows
from onfoot.formats.tokenizer import Tokenizer
from onfoot.ops.cross_entropy import IGNORE

WIDTHS = 8  # rows are padded to one of so many lengths, so that few recordings cover all pairs

ExamplePair = tuple[Example, Example]  # chosen, rejected


class Pair(NamedTuple):
    """A chosen and a rejected answer to the same prompt, one row each, and their reference log-probabilities."""

    chosen: Batch  # (1, T)
    rejected: Batch  # (1, T')
    reference: tuple[float, float]


def one_row(example: Example, width: int) -> Batch:
    """An example as a batch of one row, padded to `width`; causal attention hides the padding."""
    tokens, targets = np.zeros((1, width), np.int64), np.full((1, width), IGNORE, np.int64)
    tokens[0, : len(example)], targets[0, : len(example)] = example.tokens, example.targets
    return Batch(tokens, targets)


class Pairs:
    """Pairs of examples as rows. `reference` (N, 2) has their log-probabilities once these are known."""

    def __init__(self, examples: Sequence[ExamplePair], seed: int) -> None:
        if not examples:
            raise ValueError("need at least 1 pair, got 0")
        self.examples = examples
        if isinstance(examples, StoredPairs):
            self.longest = int(examples.examples.lengths.max())
        else:
            self.longest = max(len(e) for pair in examples for e in pair)
        self.reference = np.full((len(examples), 2), np.nan)
        self._numbers = Windows(np.arange(len(examples) + 1), 1, seed)  # windows of one token, the pair's number

    def __len__(self) -> int:
        return len(self.examples)

    def row(self, example: Example) -> Batch:
        """An example, padded to one of a few widths."""
        grid = -(-self.longest // WIDTHS)
        return one_row(example, min(-(-len(example) // grid) * grid, self.longest))

    def pair(self, number: int) -> Pair:
        """The pair of a number."""
        chosen, rejected = self.examples[number]
        reference = float(self.reference[number, 0]), float(self.reference[number, 1])
        return Pair(self.row(chosen), self.row(rejected), reference)

    def order(self, epoch: int) -> np.ndarray:
        """The order of the pairs in an epoch."""
        return self._numbers.order(epoch)

    def sample(self, first: int, count: int) -> list[Pair]:
        """Pairs first, ..., first + count − 1 of the endless shuffled sequence."""
        return [self.pair(int(number)) for number in self._numbers.indices(first, count)]


@dataclass(frozen=True)
class PreferenceSource:
    """Shuffled pairs for training, and the same pairs at each validation. β and ε are those of the DPO loss."""

    train: Pairs
    held_out: Pairs
    batch_size: int
    accumulate: int = 1
    eval_pairs: int = 192
    about: str = ""  # report of the pairs read, truncated and skipped
    begin: Place = FIRST
    beta: float = 0.1
    label_smoothing: float = 0.0

    def microbatches(self, step: int, share: Share = ALL) -> list[Pair]:
        """The pairs of a step; each is computed on its own."""
        n = self.batch_size * self.accumulate
        mine = share.of(n)
        return self.train.sample(self.begin.of(step, n) + mine.start, len(mine)) if len(mine) else []

    def validation(self, share: Share = ALL) -> list[Pair]:
        """The pairs of every validation."""
        numbers = self.held_out.order(0)[: self.eval_pairs]
        return [self.held_out.pair(int(number)) for number in numbers[share.of(len(numbers))]]

    def prompt(self) -> np.ndarray | None:
        """The prompt of the first validation pair."""
        prompt = self.held_out.examples[0][0].prompt
        return prompt.astype(np.int64) if prompt.size else None

    def steps_for(self, epochs: float, private: bool = False) -> int:
        """The number of steps of `epochs` passes over the pairs."""
        if not epochs > 0:
            raise ValueError(f"epochs must be > 0, got {epochs}")
        steps = epochs * len(self.train) / (self.batch_size * self.accumulate)
        return max(1, math.ceil(round(steps, 9)))  # 1.1 · 10 is 11

    def fingerprint(self) -> str:
        """A hash of all token ids and target masks, so that a resumed run can detect changed data."""
        digest = hashlib.sha256()
        for pairs in (self.train, self.held_out):
            digest.update(f"{len(pairs)} pairs;".encode())
            for example in (e for pair in pairs.examples for e in pair):
                digest.update(f"{len(example)};".encode() + example.ids.tobytes() + example.learn.tobytes())
        return digest.hexdigest()

    def question(self) -> str:
        """The shortest first message of a user in the validation data, if that has conversations."""
        return min((chosen.question for chosen, _ in self.held_out.examples if chosen.question), key=len, default="")

    def prompt_text(self, tokenizer: Tokenizer) -> str:
        """The text of the shortest prompt in the validation data, without special tokens."""
        prompts = (tokenizer.decode(chosen.prompt.tolist()) for chosen, _ in self.held_out.examples)
        return min((p for p in prompts if p), key=len, default="")

    @property
    def rows(self) -> int:
        """Pairs per epoch."""
        return len(self.train)

    def report(self) -> str:
        """How many pairs were read, truncated and skipped."""
        counts = f"{len(self.train):,} pairs for training, {len(self.held_out):,} for validation"
        return f"{self.about}\n{counts}" if self.about else counts


def fit_pairs(pairs: StoredPairs, max_length: int, on_long: str) -> tuple[StoredPairs, str]:
    """Applies `max_length` to both answers of each pair, as `fit` does; a pair that loses one is dropped."""
    fit(pairs.examples, max_length, on_long)  # raises where that is asked for
    longer = pairs.examples.lengths.reshape(-1, 2).max(1)  # of both answers
    long = np.flatnonzero(longer > max_length)
    keep = longer <= max_length
    if on_long == "truncate":
        keep[long] = [all(e.cut(max_length).n_targets for e in pairs[i]) for i in long.tolist()]
    kept, truncated = pairs.choose(np.flatnonzero(keep), max_length), int(keep[long].sum())
    if not kept:
        raise ValueError(
            f"none of the {len(pairs):,} pairs fits into max_length={max_length}: {nothing_left(longer, on_long)}"
        )
    n_tokens, n_targets = int(kept.examples.lengths.sum()), int(kept.examples.target_counts.sum())
    lines = [f"{len(kept):,} of {len(pairs):,} pairs, {n_tokens:,} tokens, {n_targets:,} of them targets"]
    if truncated:
        lines.append(f"{truncated:,} longer than max_length={max_length}: truncated at the end")
    if len(kept) < len(pairs):
        lines.append(f"{len(pairs) - len(kept):,} longer than max_length={max_length}: dropped")
    return kept, "\n".join(lines)


def split_pairs(pairs: StoredPairs, fraction: float, seed: int) -> tuple[StoredPairs, StoredPairs]:
    """Splits off a random `fraction`, at least one pair, for validation."""
    if len(pairs) < 2:
        raise ValueError(
            f"cannot split {len(pairs)} pair into training and validation; provide at least 2, or a separate "
            f"validation file"
        )
    n = min(max(1, round(len(pairs) * fraction)), len(pairs) - 1)
    order = np.random.default_rng(seed).permutation(len(pairs))
    return pairs.choose(np.sort(order[n:])), pairs.choose(order[:n])
