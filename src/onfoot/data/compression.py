"""The size of a text in bytes, and what xz makes of it: measures of a model that do not depend on its tokenizer."""

from __future__ import annotations

import lzma
import math

import numpy as np

from onfoot.formats.tokenizer import Tokenizer

BEFORE = 1 << 22  # tokens of the training text that xz has seen, at most: a second or two of work


def as_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> bytes:
    """The text of the tokens."""
    return tokenizer.decode([int(i) for i in ids]).encode()


def xz_loss(train: bytes, held_out: bytes) -> float:
    """What `xz -9` needs for the held-out text after the training text, in nats per byte."""
    more = len(lzma.compress(train + held_out, preset=9)) - len(lzma.compress(train, preset=9))
    return more * 8 * math.log(2) / len(held_out)
