"""Examples packed into rows, and rows into batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.data.batches import NO_EXAMPLE, Batch
from onfoot.data.example import Example
from onfoot.data.example_file import lengths_of
from onfoot.data.windows import Windows
from onfoot.ops.cross_entropy import IGNORE


class RowPlan(Sequence[list[int]]):
    """The examples of each row, in two arrays."""

    def __init__(self, numbers: np.ndarray, ends: np.ndarray) -> None:
        self.numbers, self.ends = numbers, ends  # of all rows one after the other, and where each row ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(len(self))[row]]
        row = range(len(self))[row]
        return self.numbers[self.ends[row - 1] if row else 0 : self.ends[row]].tolist()

    def sums(self, lengths: np.ndarray) -> np.ndarray:
        """The length of each row."""
        return np.diff(np.cumsum(lengths[self.numbers])[self.ends - 1], prepend=0)


def first_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> RowPlan:
    """Packs examples into rows: from the longest to the shortest, each goes into the first row with enough room."""
    size = 1
    while size < len(lengths):
        size *= 2
    room = array("q", [capacity]) * (2 * size)  # a tree with rows as leaves: room[node] is the largest of any row below
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    row_of = array("q")
    for length in array("q", sizes[order].tobytes()):
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row_of.append(node - size)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    rows = np.asarray(row_of, np.int64)
    counts = np.bincount(rows) if len(rows) else rows
    return RowPlan(order[np.argsort(rows, kind="stable")], np.cumsum(counts[counts > 0]))


class Rows:
    """Rows of examples, the same in every epoch but in a new order each time.

    With `pack`, a row holds several examples, up to `max_length` tokens; `segments` numbers them so that they do not
    attend to each other. Without, a row holds one example. Padding at the end of a row is ignored.
    """

    def __init__(self, examples: Sequence[Example], max_length: int, seed: int, pack: bool = True) -> None:
        if not examples:
            raise ValueError("need at least 1 example, got 0")
        self.examples, self.max_length, self.pack = examples, max_length, pack
        self.lengths = lengths_of(examples)
        longest = int(self.lengths.max())
        if longest > max_length:
            raise ValueError(
                f"an example of {longest} tokens does not fit into rows of {max_length}; pass --row-length {longest}, "
                f"or 0, which chooses it"
            )
        self.plan = self.pack_rows(np.arange(len(examples)))
        self._numbers = Windows(np.arange(len(self.plan) + 1), 1, seed)  # windows of one token, the row number

    def pack_rows(self, numbers: np.ndarray) -> RowPlan:
        """Rows of the examples of these numbers: several per row with `pack`, otherwise one."""
        if not self.pack:
            return RowPlan(numbers, np.arange(1, len(numbers) + 1))
        plan = first_fit_decreasing(self.lengths[numbers], self.max_length)
        return RowPlan(numbers[plan.numbers], plan.ends)

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def width(self) -> int:
        """The length of the longest row."""
        return int(self.plan.sums(self.lengths).max())

    def order(self, epoch: int) -> np.ndarray:
        """The order of the rows in an epoch."""
        return self._numbers.order(epoch)

    def sample(self, first: int, count: int) -> Batch:
        """Rows first, ..., first + count − 1 of the endless shuffled sequence."""
        return self.batch(self._numbers.indices(first, count))

    def example_numbers(self, first: int, count: int) -> np.ndarray:
        """For each token of the batch that `sample` gives, the index of its example in `examples`; padding has −1."""
        rows = [self.plan[number] for number in self._numbers.indices(first, count)]
        out = np.full((len(rows), max(self.lengths[row].sum() for row in rows)), NO_EXAMPLE)  # (B, T)
        for b, row in enumerate(rows):
            each = np.repeat(row, self.lengths[row])
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
