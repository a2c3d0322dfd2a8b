"""The layout of all trainable parameters as one vector, cut into buckets that are summed over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from onfoot.arrays import Shape
from onfoot.models.model import Model


class BucketSlice(NamedTuple):
    """A slice of a flattened parameter, and its position in a bucket."""

    name: str
    begin: int  # in the flattened parameter
    end: int
    bucket: int
    offset: int  # in the bucket


class ShardSlice(NamedTuple):
    """A slice of a flattened parameter, and its position in the shard of the rank that updates it."""

    name: str
    begin: int  # in the flattened parameter
    end: int
    rank: int
    offset: int  # in that rank's shard


class BucketLayout:
    """Parameters as one vector in buckets. Bucket lengths are multiples of `size`: each rank owns an equal part."""

    def __init__(self, shapes: Mapping[str, Shape], bucket: int, size: int) -> None:
        self.shapes, self.size = shapes, size
        self.bucket = -(-max(bucket, 1) // size) * size
        self.places: dict[str, list[BucketSlice]] = {}
        total = 0
        for name, shape in shapes.items():
            begin, count = 0, int(np.prod(shape))
            self.places[name] = []
            while begin < count:
                k, offset = divmod(total, self.bucket)
                n = min(count - begin, self.bucket - offset)
                self.places[name].append(BucketSlice(name, begin, begin + n, k, offset))
                begin, total = begin + n, total + n
        self.total = total
        full, rest = divmod(total, self.bucket)
        self.lengths = [self.bucket] * full + ([-(-rest // size) * size] if rest else [])  # the last may be padded
        self.inside: list[list[BucketSlice]] = [[] for _ in self.lengths]
        for places in self.places.values():
            for place in places:
                self.inside[place.bucket].append(place)

    @classmethod
    def of(cls, model: Model, megabytes: float, size: int) -> BucketLayout:
        """The trainable parameters in the order of the backward pass, last layer first. Tied embeddings come last."""
        names = [name for name in reversed(list(model.params)) if name in model.trainable]
        bucket = int(megabytes * 1e6 / np.dtype(model.dtype).itemsize)
        return cls({name: tuple(model.params[name].shape) for name in names}, bucket, size)

    @property
    def shard(self) -> int:
        """The number of elements per rank, including padding."""
        return sum(self.lengths) // self.size

    def chunk(self, k: int) -> slice:
        """The slice of a rank's shard that holds its part of bucket k."""
        begin = k * self.bucket // self.size
        return slice(begin, begin + self.lengths[k] // self.size)

    def owned(self, name: str) -> list[ShardSlice]:
        """The slices of a parameter that each rank owns, in order."""
        out = []
        for _, begin, end, k, offset in self.places[name]:
            width = self.lengths[k] // self.size
            while begin < end:
                rank, inside = divmod(offset, width)
                n = min(end - begin, width - inside)
                out.append(ShardSlice(name, begin, begin + n, rank, self.chunk(k).start + inside))
                begin, offset = begin + n, offset + n
        return out
