"""The training examples of a run: their tokens, and where they are in its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onfoot.data.packing import Rows
from onfoot.data.records import has_records
from onfoot.data.windows import Windows
from onfoot.formats.files import read_json
from onfoot.formats.tokenizer import Tokenizer


class Place(NamedTuple):
    """Where an example is: its file, line and, in a stream of tokens, the position of its first token in the file."""

    file: str
    line: int
    position: int | None = None
    word: str = "line"  # or the row of a table, or the entry of a list

    def __str__(self) -> str:
        return f"{self.file}, {self.word} {self.line}" + (
            "" if self.position is None else f" (token {self.position:,})"
        )


class Examples(ABC):
    """The examples of a run by number; `what` is the word for one of them."""

    what: str
    tokenizer: Tokenizer

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ids(self, number: int) -> np.ndarray:
        """The n + 1 token ids of an example of n positions: the target of position t is the id t + 1."""

    @abstractmethod
    def place(self, number: int) -> Place: ...

    def text(self, number: int) -> str:
        """The text of an example, without special tokens."""
        return self.tokenizer.decode(self.ids(number).tolist())

    def context(self, number: int, n_tokens: int) -> tuple[str, str]:
        """The texts before and after the example, of up to `n_tokens` tokens each."""
        return "", ""

    def as_json(self, number: int) -> dict[str, Any]:
        """What the examples of a .json file say about one: file, line, position, text."""
        file, line, position, word = self.place(number)
        where = {"file": file, word: line, **({} if position is None else {"position": position})}
        return {**where, "text": self.text(number)}


class LineExamples(Examples):
    """The lines or rows of the files that a fine-tuning run trains on."""

    what = "line"

    def __init__(self, rows: Rows, tokenizer: Tokenizer) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self.rows.examples)

    def ids(self, number: int) -> np.ndarray:
        return self.rows.examples[number].ids

    def place(self, number: int) -> Place:
        file, _, place = self.rows.examples[number].where.rpartition(", ")
        word, line = place.split()
        return Place(file, int(line), word=word)


class WindowExamples(Examples):
    """The windows of text that a training run trains on."""

    what = "window"

    def __init__(self, data: Path, windows: Windows, tokenizer: Tokenizer) -> None:
        self.windows, self.tokenizer = windows, tokenizer
        meta = read_json(data / "tokens.json")
        self.sources: list[str] = meta.get("sources") or ["the text"]
        # the first token of each file; runs made before these were recorded have one position for the whole stream
        self.starts: list[int] = meta.get("starts") or [0]

    def __len__(self) -> int:
        return len(self.windows)

    def ids(self, number: int) -> np.ndarray:
        begin = number * self.windows.context
        return np.asarray(self.windows.tokens[begin : begin + self.windows.context + 1], dtype=np.int64)

    def context(self, number: int, n_tokens: int) -> tuple[str, str]:
        begin, tokens = number * self.windows.context, self.windows.tokens
        end = begin + len(self.ids(number))
        before, after = tokens[max(0, begin - n_tokens) : begin], tokens[end : end + n_tokens]
        return self.tokenizer.decode(before.tolist()), self.tokenizer.decode(after.tolist())

    def place(self, number: int) -> Place:
        position = number * self.windows.context
        file = int(np.searchsorted(self.starts, position, side="right")) - 1
        start = self.starts[file]
        name = self.sources[file] if len(self.starts) == len(self.sources) else ", ".join(self.sources)
        kind = int(has_records(Path(name)))
        line = 1 + int(self._breaks_before(position)[kind] - self._breaks_before(start)[kind])
        return Place(name, line, position - start, "row" if kind and not name.lower().endswith(".jsonl") else "line")

    @cached_property
    def _breaks(self) -> np.ndarray:
        """The line ends, and the document ends, before each window, (windows + 1, 2)."""
        each = [self._count(self.windows.tokens[i : i + self.windows.context]) for i in self._begins()]
        return np.concatenate([np.zeros((1, 2), int), np.cumsum(each, axis=0)])

    def _begins(self) -> range:
        return range(0, len(self.windows.tokens), self.windows.context)

    def _breaks_before(self, position: int) -> np.ndarray:
        window, rest = divmod(position, self.windows.context)
        begin = position - rest
        return self._breaks[window] + self._count(self.windows.tokens[begin:position])

    def _count(self, ids: np.ndarray) -> np.ndarray:
        """The line ends and the EOS tokens among some tokens: they end a line of a text and of a .jsonl file."""
        return np.array([self.tokenizer.decode(ids.tolist()).count("\n"), int((ids == self.tokenizer.eos_id).sum())])
