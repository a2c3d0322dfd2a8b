"""The loss of a bigram model, which predicts a token from the one before: a yardstick for a trained model."""

from __future__ import annotations

import numpy as np

CHUNK = 1 << 20  # tokens that are counted at a time
MEASURED = 1 << 22  # tokens on which the model is measured, at most
DENSE = 1 << 22  # pairs of a vocabulary up to which all of them are counted in one table
STRENGTHS = 4.0 ** np.arange(-2, 8)  # of the smoothing


def bigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """The cross-entropy of the held-out tokens under a bigram model of the training tokens, in nats per token.

    P(b | a) = (c(a, b) + s P(b)) / (c(a) + s) with P(b) = (c(b) + 1) / (n + V): counts of the n training tokens,
    smoothed towards the frequency of b; s is that of `STRENGTHS` with the lowest loss. Only the pairs that occur in the
    first `MEASURED` held-out tokens are counted, so memory is limited whatever the text and the vocabulary.
    """
    held_out = _checked(held_out[: MEASURED + 1], vocab_size)
    codes, occurrences = np.unique(held_out[:-1] * vocab_size + held_out[1:], return_counts=True)  # (P,), (P,)
    dense = vocab_size**2 <= DENSE
    pairs = np.zeros(vocab_size**2 if dense else len(codes), np.int64)
    firsts, tokens = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for begin in range(0, len(train), CHUNK):
        part = _checked(train[begin : begin + CHUNK + 1], vocab_size)
        tokens += np.bincount(part[:CHUNK], minlength=vocab_size)
        firsts += np.bincount(part[:-1], minlength=vocab_size)
        found = part[:-1] * vocab_size + part[1:]
        pairs += np.bincount(found, minlength=len(pairs)) if dense else _count(found, codes)
    pairs = pairs[codes] if dense else pairs
    a, b = np.divmod(codes, vocab_size)
    p_b = (tokens[b] + 1) / (len(train) + vocab_size)
    losses = [-(occurrences @ np.log((pairs + s * p_b) / (firsts[a] + s))) / occurrences.sum() for s in STRENGTHS]
    return float(min(losses))


def _checked(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """The tokens as int64, so that the number of a pair fits; raises ValueError for ids beyond the vocabulary."""
    if len(tokens) and tokens.max() >= vocab_size:
        name = getattr(tokens, "filename", None) or "the token stream"
        raise ValueError(f"{name} has the id {tokens.max()}, but vocab_size is {vocab_size}; start a new run")
    return np.asarray(tokens, dtype=np.int64)


def _count(found: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """How often each of `codes`, which are sorted, is among the found ones."""
    found = np.sort(found)  # searching in order is several times as fast
    place = np.minimum(np.searchsorted(codes, found), len(codes) - 1)
    return np.bincount(place[codes[place] == found], minlength=len(codes))
