"""The KV cache: keys and values of the tokens so far, so that a step computes one row instead of all.

A token's key and value depend on nothing that comes after it, so they never change. Memory grows linearly with the
tokens: GPT-2 small over 1024 tokens keeps 2 × 12 × 1024 × 768 numbers, 72 MiB in float32.
"""

from __future__ import annotations

from typing import Any

from onfoot.arrays import Array, zeros_like_shape


class KVCache:
    """Keys and values of every block, allocated once for `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens in the cache; the model's caller advances it once a pass
        self._blocks: dict[int, tuple[Array, Array]] = {}
        self.decoder: Any = None  # what an engine keeps from token to token

    def extend(self, block: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Appends new tokens' k and v, (B, H, T, D), and returns all of them so far."""
        if block not in self._blocks:
            room = [zeros_like_shape((*x.shape[:2], self.capacity, x.shape[3]), x) for x in (k, v)]
            self._blocks[block] = (room[0], room[1])
        keys, values = self._blocks[block]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    @property
    def blocks(self) -> list[tuple[Array, Array]]:
        """Each block's keys and values, (B, H, capacity, D), once there are any."""
        return [self._blocks[b] for b in range(len(self._blocks))]

    @property
    def n_numbers(self) -> int:
        """How many numbers the cache holds room for."""
        return sum(
            int(x.size if hasattr(x.size, "real") else x.numel()) for pair in self._blocks.values() for x in pair
        )
