"""A KV cache with one slot per sequence: sequences of different lengths are decoded together, and come and go.

A row's logits do not depend on the other rows: they are bitwise those of `loop.step` on the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.arrays import Array, to_numpy, zeros_like_shape
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.models.model import Model

NO_PAD = np.zeros(1, np.int64)


class Slot(KVCache):
    """The cache of one sequence, which is part of a `SlotCache`; it also keeps the tokens that are in it."""

    def __init__(self, cache: SlotCache, index: int) -> None:
        super().__init__(cache.capacity)
        self._cache, self.index = cache, index
        self.tokens: list[int] = []  # whose keys and values are in the slot

    def room(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        keys, values = self._cache.room(layer, k, v)
        return keys[self.index : self.index + 1], values[self.index : self.index + 1]

    def truncate(self, n: int) -> None:
        """Keeps the first n tokens."""
        del self.tokens[n:]
        self.length = n

    def copy_from(self, other: Slot, n: int) -> None:
        """Replaces the content by the first n tokens of another slot."""
        for keys, values in self._cache.blocks.values():
            keys[self.index, :, :n] = keys[other.index, :, :n]
            values[self.index, :, :n] = values[other.index, :, :n]
        self.tokens = other.tokens[:n]
        self.length = n


class SlotCache:
    """The keys and values of every block, (slots, H, capacity, D); only what a sequence reaches takes up memory."""

    def __init__(self, model: Model, slots: int, capacity: int) -> None:
        self.model, self.capacity, self.n_slots = model, capacity, slots
        self.blocks: dict[str, tuple[Array, Array]] = {}
        self.slots = [Slot(self, i) for i in range(slots)]
        self.steps: dict[int, Any] = {}  # recorded steps by number of rows

    def room(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """A layer's full key and value buffers, (slots, H, capacity, D)."""
        if layer not in self.blocks:
            buffers = [zeros_like_shape((self.n_slots, x.shape[1], self.capacity, x.shape[3]), x) for x in (k, v)]
            self.blocks[layer] = (buffers[0], buffers[1])
        return self.blocks[layer]

    def prefill(self, slot: Slot, tokens: Sequence[int]) -> np.ndarray:
        """Appends several tokens to a slot; the logits of the last, (V,)."""
        new = np.asarray(tokens, dtype=np.int64)[None]  # (1, T)
        logits = to_numpy(step(self.model, new, NO_PAD, slot))[0]
        slot.tokens += tokens
        return logits

    def next_logits(self, slots: Sequence[Slot], tokens: Sequence[int]) -> np.ndarray:
        """Appends one token to each of these slots, none of which is empty; the logits (B, V)."""
        logits = None
        if self.model.engine.records:
            from onfoot.models.recorded import slot_logits

            lengths, index = (np.array(x, np.int64) for x in zip(*((s.length, s.index) for s in slots), strict=True))
            logits = slot_logits(self.model, np.array(tokens, np.int64), lengths, index, self)
        if logits is None:
            return np.stack([self.prefill(slot, [token]) for slot, token in zip(slots, tokens, strict=True)])
        for slot, token in zip(slots, tokens, strict=True):
            slot.tokens.append(token)
            slot.length += 1
        return logits
