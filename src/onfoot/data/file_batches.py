"""Batches of one data file for a measurement: windows of a text, or packed examples of prompts and completions."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from onfoot.data import corpus
from onfoot.data.batches import Batch
from onfoot.data.packing import Rows
from onfoot.data.records import first_record, has_records, is_dataset
from onfoot.data.sft_examples import has_text, read_examples
from onfoot.data.windows import Windows
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer

TEXT_CONTEXT, EXAMPLES_CONTEXT = 256, 1024  # tokens per row by default, unless the model allows fewer


class FileBatches(NamedTuple):
    """Some or all batches of a file."""

    batches: list[Batch]
    n_rows: int  # of these batches
    n_all_rows: int  # of the whole file


def read_batches(
    path: Path,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    n_positions: int,
    *,
    context: int | None = None,
    batch_size: int = 8,
    batches: int = 0,
    seed: int = 0,
) -> FileBatches:
    """The first `batches` batches of a file's rows, in an order that the seed shuffles; 0 means all.

    The rows of a text file, or of records with "text", are windows of `context` tokens. Those of prompts and
    completions are packed examples, with targets in completions only.
    """
    for name, value, minimum in (("context", context, 1), ("batch_size", batch_size, 1), ("batches", batches, 0)):
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")
    if context is not None and context > n_positions:
        raise ValueError(f"context={context} exceeds n_positions={n_positions} of the model; choose a shorter one")
    rows: Windows | Rows
    if _has_texts(path):
        rows = _windows(path, tokenizer, context or min(n_positions, TEXT_CONTEXT), seed)
    else:
        rows = _rows(path, tokenizer, template, context or min(n_positions, EXAMPLES_CONTEXT), seed)
    order = rows.order(0)[: batches * batch_size or None]
    groups = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    return FileBatches([_batch(rows, group) for group in groups], len(order), len(rows))


def _has_texts(path: Path) -> bool:
    """Whether the file has texts and not examples, by its suffix and its first record."""
    if path.is_dir() and not is_dataset(path):
        raise ValueError(f"{path} is a folder; give one file")
    corpus.find_texts([path])  # raises if there is no such file, or if it is empty
    return not has_records(path) or has_text(first_record(path))


def _windows(path: Path, tokenizer: Tokenizer, context: int, seed: int) -> Windows:
    ids = corpus.mapped_tokens([corpus.Text(str(path), path=path)], tokenizer)
    if len(ids) < 2:
        raise ValueError(f"{path} is too short: {len(ids)} tokens; a text needs at least 2, one input and one target")
    return Windows(ids, min(context, len(ids) - 1), seed)


def _rows(path: Path, tokenizer: Tokenizer, template: ChatTemplate, context: int, seed: int) -> Rows:
    examples = read_examples([path], tokenizer, template)
    long = np.flatnonzero(examples.lengths > context)
    if long.size:
        first = examples[long[0]]
        raise ValueError(
            f"{first.where}: {len(first):,} tokens exceed context={context} ({len(long):,} of {len(examples):,} "
            f"examples are too long, the longest has {examples.lengths.max():,}); raise --context (up to the model's "
            f"n_positions), or remove them"
        )
    return Rows(examples, context, seed)


def _batch(rows: Windows | Rows, numbers: np.ndarray) -> Batch:
    if isinstance(rows, Rows):
        return rows.batch(numbers)
    tokens, targets = zip(*(rows.window(int(i)) for i in numbers), strict=True)
    return Batch(np.stack(tokens), np.stack(targets))
