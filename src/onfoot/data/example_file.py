"""Examples in a temporary file, of which memory holds only the places: 25 bytes per example, however long it is.

The file has no name, so nothing is left of it when its examples are no longer used.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from types import TracebackType
from typing import Any

import numpy as np

from onfoot.data.example import Example

ID = np.dtype("<i4")
SEPARATOR = b"\0"  # between an example's place and its question; file names cannot have it
BUFFER = 1 << 20  # bytes that are written at a time


class ExampleFile:
    """Writes examples one by one; `examples` closes the file and returns them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None and os.access(folder, os.W_OK) else Path(gettempdir())
        self._file: Any = TemporaryFile(dir=self.folder, prefix=".examples-", buffering=BUFFER)  # noqa: SIM115
        self.ends = array("q", [0])  # bytes up to the end of each example
        self.sizes, self.targets, self.templated = array("q"), array("q"), bytearray()
        self.data = np.zeros(0, np.uint8)

    def __enter__(self) -> ExampleFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.sizes)

    def append(self, example: Example) -> None:
        """Writes one more example."""
        texts = example.where.encode("utf-8", "surrogatepass"), example.question.encode("utf-8", "surrogatepass")
        data = example.ids.astype(ID).tobytes() + example.learn.tobytes() + SEPARATOR.join(texts)
        self._write(data)
        self.ends.append(self.ends[-1] + len(data))
        self.sizes.append(len(example.ids))
        self.targets.append(example.n_targets)
        self.templated.append(example.templated)

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self._no_room(error)

    def _no_room(self, error: OSError) -> None:
        raise ValueError(
            f"cannot write tokenized examples to a temporary file in {self.folder} after {self.ends[-1]:,} bytes: "
            f"{error.strerror or error}; make room, or choose another disk (--out; in Python, the variable TMPDIR)"
        ) from None

    def examples(self) -> StoredExamples:
        """All examples, memory-mapped."""
        try:
            self._file.flush()
        except OSError as error:
            self._no_room(error)
        self.data = np.memmap(self._file, np.uint8, "r")
        return StoredExamples(self, np.arange(len(self)))

    def read(self, number: int) -> Example:
        """The example of this number."""
        n = self.sizes[number]
        data = self.data[self.ends[number] : self.ends[number + 1]].tobytes()
        ids, learn = np.frombuffer(data, ID, n).astype(np.int32), np.frombuffer(data, bool, n, ID.itemsize * n)
        where, question = data[(ID.itemsize + 1) * n :].decode("utf-8", "surrogatepass").split("\0", 1)
        return Example(ids, learn, where, question, bool(self.templated[number]))


class StoredExamples(Sequence[Example]):
    """Examples of a file, in the order of their numbers, each read when it is asked for; longer ones are truncated."""

    def __init__(self, file: ExampleFile, numbers: np.ndarray, max_length: int | None = None) -> None:
        self.file, self.numbers, self.max_length = file, numbers, max_length

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return StoredExamples(self.file, self.numbers[index], self.max_length)
        example = self.file.read(int(self.numbers[index]))
        return example if self.max_length is None or len(example) <= self.max_length else example.cut(self.max_length)

    def choose(self, indices: np.ndarray, max_length: int | None = None) -> StoredExamples:
        """Some of the examples, in this order."""
        return StoredExamples(self.file, self.numbers[indices], max_length or self.max_length)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example, (n,)."""
        lengths = np.frombuffer(self.file.sizes, np.int64)[self.numbers] - 1
        return lengths if self.max_length is None else np.minimum(lengths, self.max_length)

    @property
    def target_counts(self) -> np.ndarray:
        """The number of targets of each example, (n,)."""
        counts = np.frombuffer(self.file.targets, np.int64)[self.numbers]
        for i in np.flatnonzero(np.frombuffer(self.file.sizes, np.int64)[self.numbers] - 1 > self.lengths).tolist():
            counts[i] = self[i].n_targets
        return counts

    @property
    def n_templated(self) -> int:
        """How many are prompts and completions in the chat template."""
        return int(np.frombuffer(self.file.templated, np.uint8)[self.numbers].sum())


class StoredPairs(Sequence[tuple[Example, Example]]):
    """Pairs of examples, which are next to each other in a file."""

    def __init__(self, examples: StoredExamples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples) // 2

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.choose(np.arange(len(self))[index])
        i = range(len(self))[index]
        return self.examples[2 * i], self.examples[2 * i + 1]

    def choose(self, indices: np.ndarray, max_length: int | None = None) -> StoredPairs:
        """Some of the pairs, in this order."""
        return StoredPairs(self.examples.choose((2 * indices[:, None] + [0, 1]).reshape(-1), max_length))


def choose(examples: Sequence[Example], indices: np.ndarray, max_length: int | None = None) -> Sequence[Example]:
    """Some of the examples, in this order, truncated to `max_length` tokens."""
    if isinstance(examples, StoredExamples):
        return examples.choose(indices, max_length)
    chosen = [examples[i] for i in indices.tolist()]
    return [e if max_length is None or len(e) <= max_length else e.cut(max_length) for e in chosen]


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    """The number of tokens of each example, (n,)."""
    return examples.lengths if isinstance(examples, StoredExamples) else np.array([len(e) for e in examples], int)


def target_counts(examples: Sequence[Example]) -> np.ndarray:
    """The number of targets of each example, (n,)."""
    if isinstance(examples, StoredExamples):
        return examples.target_counts
    return np.array([e.n_targets for e in examples], int)


def n_templated(examples: Sequence[Example]) -> int:
    """How many are prompts and completions in the chat template."""
    return examples.n_templated if isinstance(examples, StoredExamples) else sum(e.templated for e in examples)
