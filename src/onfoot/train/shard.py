"""AdamW with sharded moments: each rank stores and updates its part of every bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.models.model import Model
from onfoot.train.buckets import SHARD
from onfoot.train.optimizer import MOMENT_NAMES, AdamW, check_moments
from onfoot.train.parallel import World
from onfoot.train.vector import BucketLayout, ShardSlice

MAX_IN_FLIGHT = 2  # buckets of weights


class ShardedAdamW(AdamW):
    """Updates the weights of this rank's shard, and all-gathers the updated weights of the others.

    The weights themselves are not sharded. Checkpoints have the same format as unsharded ones.
    """

    def __init__(self, model: Model, world: World, layout: BucketLayout, *args: Any, **kwargs: Any) -> None:
        self.world, self.layout = world, layout
        for name in layout.places:  # updates write through flat views
            if not to_numpy(model.params[name]).flags.c_contiguous:
                model.params[name] = model.engine.floats(
                    np.ascontiguousarray(to_numpy(model.params[name])), model.dtype
                )
        self.flat = {name: to_numpy(model.params[name]).reshape(-1) for name in layout.places}
        self.mine = [piece for name in layout.places for piece in layout.owned(name) if piece.rank == world.rank]
        self.mine_in: list[list[ShardSlice]] = [[] for _ in layout.lengths]  # by bucket
        for piece in self.mine:
            self.mine_in[piece.offset * layout.size // layout.bucket].append(piece)
        super().__init__(model, *args, **kwargs)

    def make_moments(self) -> None:
        for moments in (self.m, self.v):
            moments[SHARD] = np.zeros(self.layout.shard, np.dtype(self.model.dtype))

    def step(self, grads: Mapping[str, Array], lr: float | None = None, scale: float = 1.0) -> None:
        """Updates this rank's shard, then all-gathers the weights."""
        g, m, v = grads[SHARD], self.m[SHARD], self.v[SHARD]
        with self.one_step(lr, scale):
            for piece in self.mine:
                part = _in_shard(piece)
                decays = len(self.layout.shapes[piece.name]) > 1
                weights = self.flat[piece.name][piece.begin : piece.end]
                self.apply(piece.name, weights, g[part], m[part], v[part], decays)
            self.apply_pending()
            self.allgather_weights()

    def allgather_weights(self) -> None:
        """All-gathers the weights bucket by bucket, each part from the rank that owns it."""
        from mpi4py import MPI

        in_flight: deque[tuple[int, np.ndarray, Any]] = deque()
        spare: list[np.ndarray] = []
        for k, length in enumerate(self.layout.lengths):
            if len(in_flight) == MAX_IN_FLIGHT:
                spare.append(self._copy_out(*in_flight.popleft()))
            buffer = spare.pop() if spare else np.zeros(self.layout.bucket, np.dtype(self.model.dtype))
            for piece in self.mine_in[k]:
                begin = self.world.rank * (length // self.layout.size) + piece.offset - self.layout.chunk(k).start
                weights = self.flat[piece.name][piece.begin : piece.end]
                buffer[begin : begin + weights.size] = weights
            in_flight.append((k, buffer, self.world.comm.Iallgather(MPI.IN_PLACE, buffer[:length])))
        while in_flight:
            self._copy_out(*in_flight.popleft())

    def _copy_out(self, k: int, buffer: np.ndarray, request: Any) -> np.ndarray:
        request.Wait()
        for place in self.layout.inside[k]:
            weights = self.flat[place.name][place.begin : place.end]
            weights[...] = buffer[place.offset : place.offset + weights.size]
        return buffer

    def moments(self) -> dict[str, np.ndarray]:
        """The full moments, each gathered from all ranks when it is written; the other ranks call `send_moments`."""
        return {f"{kind}.{name}": _Gathered(self, kind, name) for kind in MOMENT_NAMES for name in self.layout.places}  # type: ignore[misc]

    def send_moments(self) -> None:
        """Sends this rank's part of the moments to rank 0, which receives them in any order."""
        requests = []
        for kind in MOMENT_NAMES:
            moments = getattr(self, kind)[SHARD]
            for piece in self.mine:
                requests.append(self.world.comm.Isend(moments[_in_shard(piece)], 0, self.tag(kind, piece.name)))
        from mpi4py import MPI

        self.world.poll(lambda: MPI.Request.Testall(requests))

    def tag(self, kind: str, name: str) -> int:
        """The MPI tag of a moment: a different number for each."""
        return MOMENT_NAMES.index(kind) + 2 * list(self.layout.places).index(name)

    def restore(self, moments: Mapping[str, np.ndarray], steps: int) -> None:
        """Restores this rank's part of the saved moments, and the step count."""
        shapes = self.layout.shapes.items()
        check_moments(moments, {f"{kind}.{name}": tuple(shape) for name, shape in shapes for kind in MOMENT_NAMES})
        for kind in MOMENT_NAMES:
            for piece in self.mine:
                saved = moments[f"{kind}.{piece.name}"].reshape(-1)[piece.begin : piece.end]
                getattr(self, kind)[SHARD][_in_shard(piece)] = saved
        self.steps, self._partial = steps, False


class _Gathered:
    """A moment that is gathered from all ranks when it is converted to an array."""

    def __init__(self, optimizer: ShardedAdamW, kind: str, name: str) -> None:
        self.optimizer, self.kind, self.name = optimizer, kind, name
        self.shape, self.dtype = optimizer.layout.shapes[name], np.dtype(optimizer.model.dtype)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        optimizer = self.optimizer
        out = np.empty(int(np.prod(self.shape)), self.dtype)
        for piece in optimizer.layout.owned(self.name):
            part = out[piece.begin : piece.end]
            if piece.rank == optimizer.world.rank:
                part[...] = getattr(optimizer, self.kind)[SHARD][_in_shard(piece)]
            else:
                optimizer.world.comm.Recv(part, piece.rank, optimizer.tag(self.kind, self.name))
        return out.reshape(self.shape)


def _in_shard(piece: ShardSlice) -> slice:
    return slice(piece.offset, piece.offset + piece.end - piece.begin)
