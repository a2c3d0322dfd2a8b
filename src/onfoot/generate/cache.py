"""The KV cache: keys and values of the tokens so far, so that a step computes one row instead of all.

A token's key and value depend on nothing that comes after it, so they never change. Memory grows linearly with the
tokens: GPT-2 small over 1024 tokens keeps 2 × 12 × 1024 × 768 numbers, 72 MiB in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.arrays import Array, zeros_like_shape
from onfoot.recording.planned import NotRecorded, Planned


class KVCache:
    """Keys and values of every block, allocated once for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(1, np.int64)  # where kernels read the length
        self._blocks: dict[str, tuple[Array, Array]] = {}
        self.step: Any = None  # the recording of one more token, if there is one

    @property
    def length(self) -> int:
        """Tokens in the cache; the model's caller advances it once per pass."""
        return int(self.lengths[0])

    @length.setter
    def length(self, n: int) -> None:
        self.lengths[0] = n

    def room(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """A layer's keys and values with all their room, (B, H, capacity, D)."""
        if layer not in self._blocks:
            room = [zeros_like_shape((*x.shape[:2], self.capacity, x.shape[3]), x) for x in (k, v)]
            self._blocks[layer] = (room[0], room[1])
        return self._blocks[layer]

    def extend(self, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """Appends new tokens' k and v, (B, H, T, D), and returns all of them so far."""
        if isinstance(k, Planned):
            raise NotRecorded("keys and values are copied by NumPy")
        keys, values = self.room(layer, k, v)
        end = self.length + k.shape[2]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    @property
    def n_numbers(self) -> int:
        """How many numbers the cache holds room for."""
        return sum(
            int(x.size if hasattr(x.size, "real") else x.numel()) for pair in self._blocks.values() for x in pair
        )
