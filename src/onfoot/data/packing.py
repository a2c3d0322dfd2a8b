"""Examples packed into rows, and rows into batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onfoot.data.batches import NO_EXAMPLE, Batch
from onfoot.data.sft_examples import Example
from onfoot.data.windows import Windows
from onfoot.ops.cross_entropy import IGNORE


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs examples into rows: from the longest to the shortest, each goes into the first row with enough room."""
    size = 1
    while size < len(lengths):
        size *= 2
    room = [capacity] * (2 * size)  # a binary tree with rows as leaves: room[node] is the largest room of any row below
    rows: list[list[int]] = [[] for _ in range(size)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= lengths[i] else 2 * node + 1
        rows[node - size].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [row for row in rows if row]


class Rows:
    """Rows of examples, the same in every epoch but in a new order each time.

    With `pack`, a row holds several examples, up to `max_length` tokens; `segments` numbers them so that they do not
    attend to each other. Without, a row holds one example. Padding at the end of a row is ignored.
    """

    def __init__(self, examples: Sequence[Example], max_length: int, seed: int, pack: bool = True) -> None:
        if not examples:
            raise ValueError("need at least 1 example, got 0")
        self.examples, self.max_length, self.pack = examples, max_length, pack
        longest = max(len(e) for e in examples)
        if longest > max_length:
            raise ValueError(f"an example of {longest} tokens does not fit into rows of {max_length}")
        self.plan = self.pack_rows(range(len(examples)))
        self._numbers = Windows(np.arange(len(self.plan) + 1), 1, seed)  # windows of one token, the row number

    def pack_rows(self, numbers: Sequence[int]) -> list[list[int]]:
        """Rows of the examples of these numbers: several per row with `pack`, otherwise one."""
        if not self.pack:
            return [[i] for i in numbers]
        plan = first_fit_decreasing([len(self.examples[i]) for i in numbers], self.max_length)
        return [[numbers[k] for k in row] for row in plan]

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def width(self) -> int:
        """The length of the longest row."""
        return max(sum(len(self.examples[i]) for i in row) for row in self.plan)

    def order(self, epoch: int) -> np.ndarray:
        """The order of the rows in an epoch."""
        return self._numbers.order(epoch)

    def sample(self, first: int, count: int) -> Batch:
        """Rows first, ..., first + count − 1 of the endless shuffled sequence."""
        return self.batch(self._numbers.indices(first, count))

    def example_numbers(self, first: int, count: int) -> np.ndarray:
        """For each token of the batch that `sample` gives, the index of its example in `examples`; padding has −1."""
        rows = [self.plan[number] for number in self._numbers.indices(first, count)]
        out = np.full((len(rows), max(sum(len(self.examples[i]) for i in row) for row in rows)), NO_EXAMPLE)  # (B, T)
        for b, row in enumerate(rows):
            each = np.repeat(row, [len(self.examples[i]) for i in row])
            out[b, : len(each)] = each
        return out

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The rows of these numbers as a batch."""
        return self.batch_of([self.plan[number] for number in numbers])

    def batch_of(self, plan: Sequence[Sequence[int]]) -> Batch:
        """Rows of the examples of these numbers as a batch, (B, T) with T the length of the longest."""
        rows = [[self.examples[i] for i in row] for row in plan]
        shape = len(rows), max(sum(map(len, row)) for row in rows)
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        segments = np.zeros(shape, dtype=np.int64)
        for b, row in enumerate(rows):
            end = 0
            for number, example in enumerate(row):
                span = slice(end, end + len(example))
                tokens[b, span], targets[b, span], segments[b, span] = example.tokens, example.targets, number
                end = span.stop
            segments[b, end:] = len(row)  # padding attends to no example
        return Batch(tokens, targets, segments if self.pack else None)  # unpacked: causal attention hides padding
