"""All trainable parameters as one vector, cut into buckets that are summed over the ranks one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from onfoot.arrays import Shape
from onfoot.models.model import Model


class Place(NamedTuple):
    """Where a stretch of a parameter's elements lies."""

    name: str
    begin: int  # in the parameter, flat
    end: int
    bucket: int
    offset: int  # in the bucket


class Owned(NamedTuple):
    """A stretch of a parameter's elements that one rank updates, where updates are shared out."""

    name: str
    begin: int  # in the parameter, flat
    end: int
    rank: int
    offset: int  # in that rank's shard


class BucketLayout:
    """Parameters as one vector in buckets. Each bucket's length is a multiple of the ranks, who own a part of each."""

    def __init__(self, shapes: Mapping[str, Shape], bucket: int, size: int) -> None:
        self.shapes, self.size = shapes, size
        self.bucket = -(-max(bucket, 1) // size) * size
        self.places: dict[str, list[Place]] = {}
        total = 0
        for name, shape in shapes.items():
            begin, count = 0, int(np.prod(shape))
            self.places[name] = []
            while begin < count:
                k, offset = divmod(total, self.bucket)
                n = min(count - begin, self.bucket - offset)
                self.places[name].append(Place(name, begin, begin + n, k, offset))
                begin, total = begin + n, total + n
        self.total = total
        whole, rest = divmod(total, self.bucket)
        self.lengths = [self.bucket] * whole + ([-(-rest // size) * size] if rest else [])  # the last may be padded
        self.inside: list[list[Place]] = [[] for _ in self.lengths]
        for places in self.places.values():
            for place in places:
                self.inside[place.bucket].append(place)

    @classmethod
    def of(cls, model: Model, megabytes: float, size: int) -> BucketLayout:
        """What trains, from the top of the network down: as the backward pass meets it. Tied tables come last."""
        names = [name for name in reversed(list(model.params)) if name in model.trainable]
        bucket = int(megabytes * 1e6 / np.dtype(model.dtype).itemsize)
        return cls({name: tuple(model.params[name].shape) for name in names}, bucket, size)

    @property
    def shard(self) -> int:
        """The number of elements that each rank owns, padding included."""
        return sum(self.lengths) // self.size

    def chunk(self, k: int) -> slice:
        """A rank's part of bucket k, in its shard."""
        begin = k * self.bucket // self.size
        return slice(begin, begin + self.lengths[k] // self.size)

    def owned(self, name: str) -> list[Owned]:
        """Who owns what of a parameter, in order."""
        out = []
        for _, begin, end, k, offset in self.places[name]:
            width = self.lengths[k] // self.size
            while begin < end:
                rank, inside = divmod(offset, width)
                n = min(end - begin, width - inside)
                out.append(Owned(name, begin, begin + n, rank, self.chunk(k).start + inside))
                begin, offset = begin + n, offset + n
        return out
