"""One example: its token ids, and which of them are targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onfoot.ops.cross_entropy import IGNORE


@dataclass(frozen=True, eq=False)
class Example:
    """The token ids of one example. The last one is only a target, so an example of n + 1 ids has n positions."""

    ids: np.ndarray  # (n + 1,)
    learn: np.ndarray  # (n + 1,), True for ids of a completion
    where: str  # file and line
    question: str = ""  # the first message of the user, if it is a conversation
    templated: bool = False  # a prompt and completion that were put into the chat template

    def __len__(self) -> int:
        return len(self.ids) - 1

    @property
    def tokens(self) -> np.ndarray:
        """The input ids, (n,)."""
        return self.ids[:-1]

    @property
    def targets(self) -> np.ndarray:
        """The next token of each input where that belongs to a completion, else −100, (n,)."""
        return np.where(self.learn[1:], self.ids[1:], IGNORE)

    @property
    def n_targets(self) -> int:
        return int(self.learn[1:].sum())

    @property
    def prompt(self) -> np.ndarray:
        """The ids before the first completion."""
        return self.ids[: int(self.learn.argmax())]

    def cut(self, length: int) -> Example:
        """The first `length` tokens and their targets."""
        return replace(self, ids=self.ids[: length + 1], learn=self.learn[: length + 1])
