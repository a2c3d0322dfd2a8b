"""Gradients summed over the ranks in buckets, each sent while the backward pass goes on.

All trainable parameters lie one behind the other in a single vector, in the order in which the backward pass finishes
them, and the vector is cut into buckets of equal length. As soon as a bucket is full, its sum over the ranks starts.
MPI moves data only while it is called, so a thread of its own calls it again and again as long as sums are under way;
NumPy computes meanwhile. What is not done when the backward pass ends is waited for; where MPI is for one thread only,
that is everything.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.models.model import Model
from onfoot.train.parallel import World
from onfoot.train.vector import Layout, Place

NAP = 0.0005  # seconds between calls of MPI by the thread
SHARD = "shard"  # the name of one rank's part of all sums


@dataclass
class Times:
    """Seconds of one step that this rank spent on the sums."""

    copying: float = 0.0  # gradients into buckets
    moving: float = 0.0  # the thread's own: starting sums and moving them on during the backward pass
    waiting: float = 0.0  # for what was not done when it ended, and for ranks that were slower


class Sums:
    """The sums over the microbatches of one step after the other: begin, take ..., last, take ..., finish."""

    def __init__(self) -> None:
        self.times = Times()
        self._grads: dict[str, Array] = {}

    def begin(self) -> None:
        """A new step; what a step that broke off has left does not count."""
        self._grads = {}

    def last(self) -> None:
        """What comes from here on is final: the step's last microbatch."""

    def take(self, name: str, grad: Array) -> None:
        """A parameter's gradient of one microbatch."""
        self._grads[name] = self._grads[name] + grad if name in self._grads else grad

    def finish(self) -> dict[str, Array]:
        """All sums, by name."""
        grads, self._grads = self._grads, {}
        return grads


class RankSums(Sums):
    """The sums over microbatches and ranks, in buckets.

    What a full bucket's sum is, and what a rank needs of it, is for `start` and `result` to say.
    """

    def __init__(self, world: World, layout: Layout, dtype: str) -> None:
        super().__init__()
        self.world, self.layout, self.dtype = world, layout, np.dtype(dtype)
        self.overlap = True  # False: the sums start when the backward pass has ended
        self._lock = threading.Lock()  # for MPI and all below; what is summed is the main thread's until it is full
        self._busy = threading.Event()
        self._error: BaseException | None = None
        self.begin()
        if world.threads:
            threading.Thread(target=self._keep_moving, daemon=True).start()

    def begin(self) -> None:
        with self._lock:
            self.times = Times()
            self._missing = [sum(p.end - p.begin for p in inside) for inside in self.layout.inside]
            self._started = 0
            self._taken: set[str] = set()
            self._last = False
            self._requests: list[Any] = []
            self._numbers: list[int] = []  # the buckets of the requests

    def last(self) -> None:
        self._last = True

    def take(self, name: str, grad: Array) -> None:
        begun = time.perf_counter()
        flat = to_numpy(grad).reshape(-1)
        for place in self.layout.places[name]:
            part = self.part(place)
            if name in self._taken:
                part += flat[place.begin : place.end]
            else:
                part[...] = flat[place.begin : place.end]
            if self._last:
                self._missing[place.bucket] -= part.size
                if self.overlap and self._missing[place.bucket] == 0:
                    self._busy.set()
        self._taken.add(name)
        self.times.copying += time.perf_counter() - begun

    def finish(self) -> dict[str, Array]:
        """Waits for all sums, and gives those that this rank needs. A rank without rows adds 0."""
        from mpi4py import MPI

        begun = time.perf_counter()
        for name, places in self.layout.places.items():
            if name not in self._taken:
                for place in places:
                    self.part(place)[...] = 0
        self._missing = [0] * len(self._missing)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._start_full()
            MPI.Request.Waitall(self._requests)
            for k in self._numbers:
                self.done(k)
            self._requests, self._numbers = [], []
        self.times.waiting += time.perf_counter() - begun
        return self.result()

    def result(self) -> dict[str, Array]:
        """The sums that this rank needs, by name."""
        raise NotImplementedError

    def part(self, place: Place) -> np.ndarray:
        """A place's memory."""
        return self.buffer(place.bucket)[place.offset : place.offset + place.end - place.begin]

    def buffer(self, k: int) -> np.ndarray:
        """Bucket k's memory."""
        raise NotImplementedError

    def start(self, k: int) -> Any:
        """Starts the sum of bucket k over the ranks; an MPI request."""
        raise NotImplementedError

    def done(self, k: int) -> None:
        """Bucket k has been summed."""

    def _keep_moving(self) -> None:
        """The thread: starts sums and moves them on while any is under way."""
        while self._error is None:
            self._busy.wait()
            with self._lock:
                begun = time.thread_time()
                self._busy.clear()
                try:
                    self._start_full()
                    self._move()
                except BaseException as error:  # the main thread raises it
                    self._error = error
                if self._requests:
                    self._busy.set()
                self.times.moving += time.thread_time() - begun
            time.sleep(NAP)

    def _start_full(self) -> None:
        """Starts the buckets that are full, in order: all ranks must start the same sums in the same order."""
        while self._started < len(self._missing) and self._missing[self._started] == 0:
            k = self._started
            self.buffer(k)[sum(p.end - p.begin for p in self.layout.inside[k]) :] = 0  # padding
            self._requests.append(self.start(k))
            self._numbers.append(k)
            self._started += 1

    def _move(self) -> None:
        """Lets MPI work on what is under way."""
        from mpi4py import MPI

        for i in sorted(MPI.Request.Testsome(self._requests) or [], reverse=True):
            del self._requests[i]
            self.done(self._numbers.pop(i))


class WholeSums(RankSums):
    """Every rank gets all sums, by all-reduce: what an optimizer on every rank needs."""

    def __init__(self, world: World, layout: Layout, model: Model) -> None:
        super().__init__(world, layout, model.dtype)
        self.vector = np.zeros(sum(layout.lengths), self.dtype)
        self.grads: dict[str, Array] = {}
        for name, places in layout.places.items():
            begin = places[0].bucket * layout.bucket + places[0].offset
            part = self.vector[begin : begin + places[-1].end]
            self.grads[name] = model.engine.floats(part.reshape(layout.shapes[name]), model.dtype)  # the same memory

    def result(self) -> dict[str, Array]:
        return self.grads

    def buffer(self, k: int) -> np.ndarray:
        begin = k * self.layout.bucket
        return self.vector[begin : begin + self.layout.lengths[k]]

    def start(self, k: int) -> Any:
        from mpi4py import MPI

        return self.world.comm.Iallreduce(MPI.IN_PLACE, self.buffer(k))


class ShardSums(RankSums):
    """Every rank gets its own part of each bucket, by reduce-scatter. Buckets that are done are used again."""

    def __init__(self, world: World, layout: Layout, model: Model) -> None:
        super().__init__(world, layout, model.dtype)
        self.shard = np.zeros(layout.shard, self.dtype)
        self._buffers: dict[int, np.ndarray] = {}
        self._free: list[np.ndarray] = []

    def result(self) -> dict[str, Array]:
        return {SHARD: self.shard}

    def buffer(self, k: int) -> np.ndarray:
        if k not in self._buffers:
            self._buffers[k] = self._free.pop() if self._free else np.empty(self.layout.bucket, self.dtype)
        return self._buffers[k][: self.layout.lengths[k]]

    def start(self, k: int) -> Any:
        return self.world.comm.Ireduce_scatter_block(self.buffer(k), self.shard[self.layout.chunk(k)])

    def done(self, k: int) -> None:
        self._free.append(self._buffers.pop(k))

    @property
    def buffer_bytes(self) -> int:
        """The memory of all buckets that were ever under way at once."""
        return sum(b.nbytes for b in [*self._free, *self._buffers.values()])
