"""Windows of a token stream in a seeded random order: the step number alone determines the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from onfoot.ops.cross_entropy import IGNORE

Batch = tuple[np.ndarray, np.ndarray]  # tokens and targets, (B, T) each


@dataclass(frozen=True)
class Windows:
    """A token stream cut into windows of `context` tokens, with the next tokens as targets.

    The windows do not overlap: every token but the first is a target exactly once per epoch. The last window may be
    padded; the targets of padding are ignored.
    """

    tokens: np.ndarray
    context: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise ValueError(f"need at least 2 tokens (one input and one target), got {len(self.tokens)}")

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    def window(self, index: int) -> Batch:
        """Tokens and targets of one window, (context,) each."""
        begin = index * self.context
        piece = np.asarray(self.tokens[begin : begin + self.context + 1], dtype=np.int64)
        tokens = np.zeros(self.context, dtype=np.int64)
        targets = np.full(self.context, IGNORE, dtype=np.int64)
        tokens[: len(piece) - 1] = piece[:-1]
        targets[: len(piece) - 1] = piece[1:]
        return tokens, targets

    def batch(self, indices: Iterable[int]) -> Batch:
        """Tokens and targets of several windows, (B, context) each."""
        tokens, targets = zip(*(self.window(int(i)) for i in indices), strict=True)
        return np.stack(tokens), np.stack(targets)

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of the windows in an epoch, determined by the seed and the epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))

    def sample(self, first: int, count: int) -> Batch:
        """Windows first, ..., first + count − 1 of the endless shuffled sequence, (count, context)."""
        return self.batch(self.indices(first, count))

    def indices(self, first: int, count: int) -> list[int]:
        """The windows at places first, ..., first + count − 1 of the endless shuffled sequence."""
        places = (divmod(number, len(self)) for number in range(first, first + count))
        return [int(self._order(epoch)[position]) for epoch, position in places]

    def _order(self, epoch: int) -> np.ndarray:
        cache: dict[int, np.ndarray] = self.__dict__.setdefault("_orders", {})  # of one epoch only
        if epoch not in cache:
            cache.clear()
            cache[epoch] = self.order(epoch)
        return cache[epoch]


def split(tokens: np.ndarray, fraction: float, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits off the last `fraction` of the stream for validation; the rest is for training."""
    n_validation = int(len(tokens) * fraction)
    n_train = len(tokens) - n_validation
    for part, size in (("training", n_train), ("validation", n_validation)):
        if size < context + 1:
            raise ValueError(
                f"the text has {len(tokens):,} tokens, which leaves {size:,} for {part}: less than one window of "
                f"{context} + 1 tokens; use more text or a shorter context"
            )
    return tokens[:n_train], tokens[n_train:]
