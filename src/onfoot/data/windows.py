"""Windows of a token stream in a fixed random order: the sample of any step follows from its number alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onfoot.ops.cross_entropy import IGNORE

Batch = tuple[np.ndarray, np.ndarray]  # tokens and targets, (B, T) each


@dataclass(frozen=True)
class Windows:
    """A token stream cut into windows of `context` tokens, each with its successors as targets.

    The windows do not overlap and leave nothing out: every token but the first is a target exactly once an epoch. The
    last window may be shorter; what is missing there does not count.
    """

    tokens: np.ndarray
    context: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2:
            raise ValueError(f"{len(self.tokens)} tokens: at least 2 are needed, one and its successor")

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context)

    def window(self, index: int) -> Batch:
        """The window of that index in the stream, (context,) each."""
        begin = index * self.context
        piece = np.asarray(self.tokens[begin : begin + self.context + 1], dtype=np.int64)
        tokens = np.zeros(self.context, dtype=np.int64)
        targets = np.full(self.context, IGNORE, dtype=np.int64)
        tokens[: len(piece) - 1] = piece[:-1]
        targets[: len(piece) - 1] = piece[1:]
        return tokens, targets

    def order(self, epoch: int) -> np.ndarray:
        """The order of the windows in an epoch: a permutation that the seed and the epoch determine."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))

    def sample(self, first: int, count: int) -> Batch:
        """Samples number first, ..., first + count − 1 of the endless shuffled stream, (count, context)."""
        pairs = []
        order, order_epoch = np.empty(0), -1
        for number in range(first, first + count):
            epoch, place = divmod(number, len(self))
            if epoch != order_epoch:
                order, order_epoch = self._order(epoch), epoch
            pairs.append(self.window(int(order[place])))
        tokens, targets = zip(*pairs, strict=True)
        return np.stack(tokens), np.stack(targets)

    def _order(self, epoch: int) -> np.ndarray:
        cache: dict[int, np.ndarray] = self.__dict__.setdefault("_orders", {})  # one epoch is kept
        if epoch not in cache:
            cache.clear()
            cache[epoch] = self.order(epoch)
        return cache[epoch]


def split(tokens: np.ndarray, fraction: float, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The stream's beginning for training and its end, a `fraction` of it, for validation."""
    n_validation = int(len(tokens) * fraction)
    n_train = len(tokens) - n_validation
    for part, size in (("training", n_train), ("validation", n_validation)):
        if size < context + 1:
            raise ValueError(
                f"the text has {len(tokens):,} tokens, which leaves {size:,} for {part}: less than one window of "
                f"{context} and a successor; give more text or a shorter context"
            )
    return tokens[:n_train], tokens[n_train:]
