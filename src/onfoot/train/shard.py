"""AdamW whose running means are shared out over the ranks: each keeps, and updates, its part of every bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.models.model import Model
from onfoot.train.buckets import SHARD
from onfoot.train.optimizer import MEANS, AdamW, check_moments
from onfoot.train.parallel import World
from onfoot.train.vector import BucketLayout, Owned

AHEAD = 2  # buckets of weights under way at a time


class ShardedAdamW(AdamW):
    """Takes the sums of this rank's shard, updates its weights, and gets all other weights from the ranks they are on.

    The weights themselves are whole on every rank. A checkpoint has the same form as any other.
    """

    def __init__(self, model: Model, world: World, layout: BucketLayout, *args: Any, **kwargs: Any) -> None:
        self.world, self.layout = world, layout
        for name in layout.places:  # an update writes through flat views
            if not to_numpy(model.params[name]).flags.c_contiguous:
                model.params[name] = model.engine.floats(
                    np.ascontiguousarray(to_numpy(model.params[name])), model.dtype
                )
        self.flat = {name: to_numpy(model.params[name]).reshape(-1) for name in layout.places}
        self.mine = [piece for name in layout.places for piece in layout.owned(name) if piece.rank == world.rank]
        self.mine_in: list[list[Owned]] = [[] for _ in layout.lengths]  # by bucket
        for piece in self.mine:
            self.mine_in[piece.offset * layout.size // layout.bucket].append(piece)
        super().__init__(model, *args, **kwargs)

    def make_moments(self) -> None:
        for means in (self.m, self.v):
            means[SHARD] = np.zeros(self.layout.shard, np.dtype(self.model.dtype))

    def step(self, grads: Mapping[str, Array], lr: float | None = None, scale: float = 1.0) -> None:
        """One update of this rank's shard; then every rank gets all weights."""
        g, m, v = grads[SHARD], self.m[SHARD], self.v[SHARD]
        with self.one_step(lr, scale):
            for piece in self.mine:
                part = _in_shard(piece)
                decays = len(self.layout.shapes[piece.name]) > 1
                weights = self.flat[piece.name][piece.begin : piece.end]
                self.apply(weights, g[part], m[part], v[part], decays)
            self.update_waiting()
            self.share_weights()

    def share_weights(self) -> None:
        """All-gathers the weights bucket by bucket, each rank's part from its owner."""
        from mpi4py import MPI

        under_way: deque[tuple[int, np.ndarray, Any]] = deque()
        spare: list[np.ndarray] = []
        for k, length in enumerate(self.layout.lengths):
            if len(under_way) == AHEAD:
                spare.append(self._land(*under_way.popleft()))
            buffer = spare.pop() if spare else np.zeros(self.layout.bucket, np.dtype(self.model.dtype))
            for piece in self.mine_in[k]:
                begin = self.world.rank * (length // self.layout.size) + piece.offset - self.layout.chunk(k).start
                weights = self.flat[piece.name][piece.begin : piece.end]
                buffer[begin : begin + weights.size] = weights
            under_way.append((k, buffer, self.world.comm.Iallgather(MPI.IN_PLACE, buffer[:length])))
        while under_way:
            self._land(*under_way.popleft())

    def _land(self, k: int, buffer: np.ndarray, request: Any) -> np.ndarray:
        request.Wait()
        for place in self.layout.inside[k]:
            weights = self.flat[place.name][place.begin : place.end]
            weights[...] = buffer[place.offset : place.offset + weights.size]
        return buffer

    def moments(self) -> dict[str, np.ndarray]:
        """The whole running means, each put together from all ranks when it is written; the others `send_moments`."""
        return {f"{kind}.{name}": _Gathered(self, kind, name) for kind in MEANS for name in self.layout.places}  # type: ignore[misc]

    def everything(self) -> dict[str, np.ndarray]:
        """What must be the same on all ranks: the trained weights."""
        return {name: flat.reshape(self.layout.shapes[name]) for name, flat in self.flat.items()}

    def total(self, squares: np.ndarray) -> float:
        """The sum of the squares of all gradients: each rank has those of its shard."""
        return float(squares.sum())

    def send_moments(self) -> None:
        """Gives rank 0 this rank's part of the running means, in whatever order it asks for them."""
        requests = []
        for kind in MEANS:
            means = getattr(self, kind)[SHARD]
            for piece in self.mine:
                requests.append(self.world.comm.Isend(means[_in_shard(piece)], 0, self.tag(kind, piece.name)))
        from mpi4py import MPI

        self.world.poll(lambda: MPI.Request.Testall(requests))

    def tag(self, kind: str, name: str) -> int:
        """The messages' tag: a number for each running mean."""
        return MEANS.index(kind) + 2 * list(self.layout.places).index(name)

    def restore(self, moments: Mapping[str, np.ndarray], steps: int) -> None:
        """Goes on from saved running means, whoever saved them: this rank reads its part of them."""
        check_moments(moments, self.layout.shapes)
        for kind in MEANS:
            for piece in self.mine:
                saved = moments[f"{kind}.{piece.name}"].reshape(-1)[piece.begin : piece.end]
                getattr(self, kind)[SHARD][_in_shard(piece)] = saved
        self.steps, self._torn = steps, False


class _Gathered:
    """A running mean that is not in memory until it is asked for."""

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


def _in_shard(piece: Owned) -> slice:
    return slice(piece.offset, piece.offset + piece.end - piece.begin)
