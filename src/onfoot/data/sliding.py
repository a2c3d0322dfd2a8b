"""The documents of a data file as tokens with targets, and sliding windows over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onfoot.data import corpus
from onfoot.data.records import ReadLog, has_records, is_dataset, records
from onfoot.data.sft_examples import has_text, read_example, read_parts
from onfoot.formats.chat import ChatTemplate, check_text
from onfoot.formats.tokenizer import Tokenizer
from onfoot.ops.cross_entropy import IGNORE

SORTED = 16  # batches whose windows are sorted by length, so that those of a batch need little padding
NARROW = 16  # widths of batches are powers of 2 from this on, so that few shapes occur

Window = tuple[np.ndarray, np.ndarray]  # tokens and targets, (T,) each; in a batch (B, T)


class Piece(NamedTuple):
    """Consecutive tokens of a document. The first token of a document is never a target."""

    ids: np.ndarray  # (n,)
    learn: np.ndarray  # (n,), True for targets
    n_bytes: int  # of the targets' text


def read_documents(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate, limit: int | None = None
) -> Iterator[Iterator[Piece]]:
    """The documents of a file, each an iterator over pieces: the file itself, or each of its records.

    A text starts after the BOS or EOS token, so that all its tokens are targets. Of a record with prompts and
    completions, the completions are targets, as in fine-tuning. With a limit, the documents end after so many bytes of
    targets, whatever the tokenizer; a record with prompts and completions is never cut.
    """
    if path.is_dir() and not is_dataset(path):
        raise ValueError(f"{path} is a folder; give one file")
    corpus.find_texts([path])  # raises if there is no such file, or if it is empty
    if not has_records(path):
        yield text_pieces(_first_bytes(corpus.file_pieces(path), limit), tokenizer)
        return

    def read(value: object, where: str) -> list[Piece]:
        return _record_pieces(value, tokenizer, template, where, limit)

    for pieces in ReadLog().read(records(path), read):
        yield iter(pieces)
        if limit is not None:
            limit -= sum(piece.n_bytes for piece in pieces)
            if limit <= 0:
                return


def start_id(tokenizer: Tokenizer) -> int | None:
    """The token before the first of a text: BOS if the tokenizer has it, else EOS, if any."""
    start = tokenizer.bos or tokenizer.eos
    return None if start is None else tokenizer.backend.token_to_id(start)


def text_pieces(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The tokens of one text that comes in pieces; without BOS and EOS tokens, its first token is not a target."""
    start, first = start_id(tokenizer), True
    for text in texts:
        ids = np.asarray(tokenizer.encode(text), np.int64)
        learn, n_bytes = np.ones(len(ids), bool), len(text.encode("utf-8"))
        if first and start is not None:
            ids, learn = np.insert(ids, 0, start), np.insert(learn, 0, False)
        piece = Piece(ids, learn, n_bytes)
        yield _without_first(piece, tokenizer) if first else piece
        first = first and not len(ids)


def _without_first(piece: Piece, tokenizer: Tokenizer) -> Piece:
    """The same, but its first token is not a target: nothing comes before it."""
    if not piece.learn[:1].any():
        return piece
    learn = piece.learn.copy()
    learn[0] = False
    return Piece(piece.ids, learn, piece.n_bytes - _n_bytes(tokenizer, piece.ids[:1]))


def _record_pieces(
    value: object, tokenizer: Tokenizer, template: ChatTemplate, where: str, limit: int | None
) -> list[Piece]:
    """The pieces of one record."""
    if isinstance(value, dict) and has_text(value):
        return list(text_pieces(_first_bytes([check_text(value["text"], '"text"')], limit), tokenizer))
    parts = read_parts(value, template)
    example = read_example(value, template, tokenizer, where)
    n_bytes = sum(len(part.text.encode("utf-8")) for part in parts if part.learn)
    return [_without_first(Piece(example.ids.astype(np.int64), example.learn, n_bytes), tokenizer)]


def _first_bytes(texts: Iterable[str], limit: int | None) -> Iterator[str]:
    """The first bytes of a text that comes in pieces, without an incomplete character at the end."""
    for text in texts:
        data = text.encode("utf-8")
        if limit is None or len(data) <= limit:
            limit = None if limit is None else limit - len(data)
            yield text
            continue
        if limit:
            yield data[:limit].decode("utf-8", errors="ignore")
        return


def _n_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    return len(tokenizer.decode(ids.tolist()).encode("utf-8"))


def sliding_windows(document: Iterable[Piece], context: int, stride: int) -> Iterator[Window]:
    """Windows of at most `context` tokens with their next tokens as targets, each target in exactly one window.

    The first window ends after `context` tokens, each further one `stride` tokens later, the last with the document.
    A target counts in the first window that has it, where at least context − stride tokens stand before the stride.
    """
    ids, learn = np.zeros(0, np.int64), np.zeros(0, bool)  # from the start of the last window on
    done, end = 0, context  # the last target that has been counted, and the last of the next window
    for piece in document:
        ids, learn = np.concatenate([ids, piece.ids]), np.concatenate([learn, piece.learn])
        while len(ids) > end:
            yield from _window(ids, learn, done, end, context)
            ids, learn = ids[end - context :], learn[end - context :]
            done, end = context, context + stride
    if len(ids) > done + 1:
        yield from _window(ids, learn, done, len(ids) - 1, context)


def _window(ids: np.ndarray, learn: np.ndarray, done: int, end: int, context: int) -> Iterator[Window]:
    """The window of the tokens before `end`, unless none of its targets counts."""
    begin = max(0, end - context)
    targets = np.where(learn[begin + 1 : end + 1], ids[begin + 1 : end + 1], IGNORE)
    targets[: done - begin] = IGNORE  # counted before
    if (targets != IGNORE).any():
        yield ids[begin:end], targets


def window_batches(windows: Iterator[Window], batch_size: int, context: int) -> Iterator[Window]:
    """Tokens and targets of several windows, (B, T) each, padded at the end."""
    while group := sorted(islice(windows, SORTED * batch_size), key=lambda window: -len(window[0])):
        for begin in range(0, len(group), batch_size):
            yield padded_batch(group[begin : begin + batch_size], context)


def padded_batch(windows: list[Window], context: int) -> Window:
    """Windows of any lengths as one batch, as wide as the longest or a little wider."""
    longest = max(len(tokens) for tokens, _ in windows)
    width = min(context, max(NARROW, 1 << (longest - 1).bit_length()))
    batch_tokens = np.zeros((len(windows), width), np.int64)
    batch_targets = np.full((len(windows), width), IGNORE, np.int64)
    for row, (tokens, targets) in enumerate(windows):
        batch_tokens[row, : len(tokens)] = tokens
        batch_targets[row, : len(targets)] = targets
    return batch_tokens, batch_targets
