"""Checks of what users pass in. Every refusal names the value, the limit and the way out."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.ops.cross_entropy import IGNORE


def check_tokens(tokens: Any, vocab_size: int, n_positions: int) -> np.ndarray:
    """`tokens` as an integer array (B, T) that the model can take, or a ValueError."""
    array = to_numpy(tokens)
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"tokens have dtype {array.dtype}; integers are needed (token ids, for example from a tokenizer)"
        )
    if array.ndim != 2:
        raise ValueError(
            f"tokens have shape {array.shape}; (batch, tokens) is needed: write tokens[None] for one sequence"
        )
    if array.size == 0:
        raise ValueError(
            f"tokens have shape {array.shape}: an empty batch; at least one sequence of one token is needed"
        )
    if array.shape[1] > n_positions:
        raise ValueError(
            f"a sequence of {array.shape[1]} tokens exceeds n_positions={n_positions}; "
            f"shorten it, cut it into pieces, or create the model with more positions"
        )
    _check_ids(array, vocab_size, "token")
    return array.astype(np.int64, copy=False)


def check_targets(targets: Any, tokens: np.ndarray, vocab_size: int, positions: np.ndarray | None) -> np.ndarray:
    """`targets` as an integer array of the tokens' shape, or a ValueError; None means each next token.

    `positions` are those of packed examples, where there are any: the first of an example is no token's successor.
    """
    if targets is None:
        successors = next_token_targets(tokens)
        if positions is not None:
            successors[:, :-1][positions[:, 1:] == 0] = IGNORE
        return successors
    array = to_numpy(targets)
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"targets have dtype {array.dtype}; integers are needed ({IGNORE} where a token has no target)"
        )
    if array.shape != tokens.shape:
        raise ValueError(f"targets have shape {array.shape}, tokens {tokens.shape}; they must be the same")
    array = array.astype(np.int64, copy=False)
    _check_ids(array[array != IGNORE], vocab_size, "target")
    return array


def next_token_targets(tokens: np.ndarray) -> np.ndarray:
    """Each token's successor; the last of a sequence has none, and gets −100."""
    targets = np.full_like(tokens, IGNORE)
    targets[:, :-1] = tokens[:, 1:]
    return targets


def count_targets(targets: np.ndarray) -> int:
    """How many targets count, or a ValueError where none does: a mean over nothing has no value."""
    n = int((targets != IGNORE).sum())
    if n == 0:
        raise ValueError(f"no target counts: all {targets.size} are {IGNORE}; at least one real target is needed")
    return n


def no_step(what: str, changed: bool = False) -> ValueError:
    """What is said of a loss or gradients that no step can be taken from."""
    return ValueError(f"{what}: the step is not taken and no weight has changed; try a lower lr")


def check_segments(segments: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From each token's example number (B, T): its position in its example, and where the example begins."""
    array = to_numpy(segments)
    if array.shape != tokens.shape:
        raise ValueError(f"segments have shape {array.shape}, tokens {tokens.shape}; they must be the same")
    if array.dtype.kind not in "iu" or (np.diff(array, axis=1) < 0).any():
        raise ValueError("segments must be integers that do not fall along a sequence: 0 0 0 1 1 2 ...")
    index = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    begins = np.ones(tokens.shape, dtype=bool)
    begins[:, 1:] = array[:, 1:] != array[:, :-1]
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    return index - start, start


def _check_ids(ids: np.ndarray, vocab_size: int, what: str) -> None:
    if ids.size and ids.astype(np.uint64, copy=False).max() >= vocab_size:  # one below 0 is very large then
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(
            f"{what} id {bad} is outside 0 ... {vocab_size - 1} (vocab_size={vocab_size}); "
            f"is the tokenizer the model's own?"
        )
