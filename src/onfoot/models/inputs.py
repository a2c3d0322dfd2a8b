"""Checks of user input. Every error names the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.ops.cross_entropy import IGNORE

if TYPE_CHECKING:
    from onfoot.formats.tokenizer import Tokenizer


def is_text(tokens: Any) -> bool:
    """Whether a text or a list of texts was given, where token ids may be given too."""
    if isinstance(tokens, str):
        return True
    items = tokens if isinstance(tokens, list | tuple) else ()
    n = sum(isinstance(item, str) for item in items)
    if 0 < n < len(items):
        raise ValueError(f"{n} of {len(items)} items are texts and the others are not; pass one kind")
    return n > 0


def as_list(texts: str | Sequence[str]) -> list[str]:
    """One text or several, as a list."""
    return [texts] if isinstance(texts, str) else list(texts)


def encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """The ids of a text with the tokens that the tokenizer puts around it, or a ValueError if there are none."""
    if tokenizer is None:
        raise ValueError("text needs a tokenizer, but this model has none; set model.tokenizer, or pass token ids")
    ids = tokenizer.encode(text, add_special_tokens=True)
    if not ids:
        raise ValueError("an empty text has no tokens; give some text, or token ids such as a start token's")
    return ids


def encode_batch(tokenizer: Tokenizer | None, texts: str | Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (B, T) of texts, each token's target the next; shorter texts are padded at the end."""
    rows = [encode(tokenizer, text) for text in as_list(texts)]
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    targets = np.full_like(tokens, IGNORE)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
        targets[row, : len(ids) - 1] = ids[1:]
    return tokens, targets


def check_tokens(tokens: Any, vocab_size: int, n_positions: int) -> np.ndarray:
    """`tokens` as a valid integer array (B, T), or a ValueError."""
    array = to_numpy(tokens)
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers (token ids, for example from a tokenizer), got dtype {array.dtype}")
    if array.ndim != 2:
        raise ValueError(
            f"tokens must have shape (batch, tokens), got {array.shape}; pass tokens[None] for one sequence"
        )
    if array.size == 0:
        raise ValueError(f"empty batch: tokens have shape {array.shape}; pass at least one sequence of one token")
    if array.shape[1] > n_positions:
        raise ValueError(
            f"a sequence of {array.shape[1]} tokens exceeds n_positions={n_positions}; "
            f"shorten it, split it, or create the model with more positions"
        )
    _check_ids(array, vocab_size, "token")
    return array.astype(np.int64, copy=False)


def check_targets(targets: Any, tokens: np.ndarray, vocab_size: int, positions: np.ndarray | None) -> np.ndarray:
    """`targets` as an integer array of the tokens' shape, or a ValueError; None means each next token.

    `positions` are those of packed examples, if any: the first token of an example is not a target.
    """
    if targets is None:
        successors = next_token_targets(tokens)
        if positions is not None:
            successors[:, :-1][positions[:, 1:] == 0] = IGNORE
        return successors
    array = to_numpy(targets)
    if array.dtype.kind not in "iu":
        raise ValueError(f"targets must be integers ({IGNORE} where a token has no target), got dtype {array.dtype}")
    if array.shape != tokens.shape:
        raise ValueError(f"targets have shape {array.shape}, but tokens have shape {tokens.shape}; they must match")
    array = array.astype(np.int64, copy=False)
    _check_ids(array[array != IGNORE], vocab_size, "target")
    return array


def next_token_targets(tokens: np.ndarray) -> np.ndarray:
    """Each token's next token; the last of a sequence has none, and gets −100."""
    targets = np.full_like(tokens, IGNORE)
    targets[:, :-1] = tokens[:, 1:]
    return targets


def count_targets(targets: np.ndarray) -> int:
    """The number of targets that are not −100, or a ValueError if there is none: the mean would be undefined."""
    n = int((targets != IGNORE).sum())
    if n == 0:
        raise ValueError(f"all {targets.size} targets are {IGNORE} (ignored); at least one must be a token id")
    return n


def no_step(what: str, changed: bool = False) -> ValueError:
    """The error for a loss or gradients that are not finite."""
    return ValueError(f"{what}: the step was skipped and no weight has changed; try a lower lr")


def check_segments(segments: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From each token's example number (B, T): its position in its example, and where the example starts."""
    array = to_numpy(segments)
    if array.shape != tokens.shape:
        raise ValueError(f"segments have shape {array.shape}, but tokens have shape {tokens.shape}; they must match")
    if array.dtype.kind not in "iu" or (np.diff(array, axis=1) < 0).any():
        raise ValueError("segments must be integers that never decrease along a sequence: 0 0 0 1 1 2 ...")
    index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = array[:, 1:] != array[:, :-1]
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return index - start, start


def _check_ids(ids: np.ndarray, vocab_size: int, what: str) -> None:
    if ids.size and ids.astype(np.uint64, copy=False).max() >= vocab_size:  # as unsigned, negative ids are very large
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(
            f"{what} id {bad} is outside 0 ... {vocab_size - 1} (vocab_size={vocab_size}); "
            f"does the tokenizer belong to this model?"
        )
