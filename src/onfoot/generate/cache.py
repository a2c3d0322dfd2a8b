"""The KV cache: keys and values of all previous tokens, so that a step computes one row instead of all.

A token's key and value do not depend on later tokens, so they never change. Memory grows linearly with the number of
tokens: GPT-2 small with 1024 tokens keeps 2 × 12 × 1024 × 768 numbers, 72 MiB in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.arrays import Array, zeros_like_shape
from onfoot.recording.recorded_array import CannotRecord, RecordedArray


class KVCache:
    """The keys and values of every block, allocated once for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(1, np.int64)  # an array, so that kernels can read the length
        self.slots: Any = None  # the slot of each row, if sequences are in slots (`generate.slots`)
        self._blocks: dict[str, tuple[Array, Array]] = {}
        self.step: Any = None  # the recorded step for one new token, if there is one

    @property
    def length(self) -> int:
        """The number of tokens in the cache; the caller of the model updates it once per forward pass."""
        return int(self.lengths[0])

    @length.setter
    def length(self, n: int) -> None:
        self.lengths[0] = n

    def room(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """A layer's full key and value buffers, (B, H, capacity, D)."""
        if layer not in self._blocks:
            buffers = [zeros_like_shape((*x.shape[:2], self.capacity, x.shape[3]), x) for x in (k, v)]
            self._blocks[layer] = (buffers[0], buffers[1])
        return self._blocks[layer]

    def extend(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """Appends k and v of new tokens, (B, H, T, D), and returns all keys and values so far."""
        if isinstance(k, RecordedArray):
            raise CannotRecord("keys and values are copied by NumPy")
        keys, values = self.room(layer, k, v)
        end = self.length + k.shape[2]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    @property
    def n_numbers(self) -> int:
        """The number of elements allocated in the cache."""
        return sum(
            int(x.size if hasattr(x.size, "real") else x.numel()) for pair in self._blocks.values() for x in pair
        )
