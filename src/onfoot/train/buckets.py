"""Gradients summed over the ranks in buckets, overlapped with the backward pass.

The gradients of all trainable parameters form one vector, in the order in which the backward pass finishes them, cut
into buckets of equal length. As soon as a bucket is full, its sum over the ranks starts. MPI makes progress only while
it is called, so a separate thread polls it while sums are in flight and NumPy computes. `finish` waits for the
remaining sums; with a single-threaded MPI library, that is all of them.
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
from onfoot.train.vector import BucketLayout, BucketSlice

POLL_SECONDS = 0.0005  # between calls of MPI by the thread
SHARD = "shard"  # the key of one rank's part of all sums


@dataclass
class Times:
    """Seconds that this rank spent on the sums of one step."""

    copying: float = 0.0  # copying gradients into buckets
    moving: float = 0.0  # CPU time of the thread: starting sums and polling MPI during the backward pass
    waiting: float = 0.0  # after the backward pass: for unfinished sums and slower ranks


class GradientAccumulator:
    """Sums gradients over the microbatches of a step: begin, add ..., last, add ..., finish."""

    def __init__(self) -> None:
        self.times = Times()
        self._grads: dict[str, Array] = {}

    def begin(self) -> None:
        """Starts a new step; gradients left by an interrupted step are discarded."""
        self._grads = {}

    def last(self) -> None:
        """Announces the last microbatch of the step: from here on, added gradients are final."""

    def add(self, name: str, grad: Array) -> None:
        """Adds the gradient of one parameter from one microbatch."""
        self._grads[name] = self._grads[name] + grad if name in self._grads else grad

    def finish(self) -> dict[str, Array]:
        """The summed gradients, by name."""
        grads, self._grads = self._grads, {}
        return grads

    def total_squares(self, squares: np.ndarray) -> float:
        """The sum of squares of all gradients, from that of each rank's result: all equal, up to rounding."""
        return float(squares.max())


class BucketedGradients(GradientAccumulator):
    """Sums gradients over microbatches and ranks, in buckets.

    Subclasses define the collective (`start`) and the sums that a rank receives (`result`).
    """

    def __init__(self, world: World, layout: BucketLayout, dtype: str) -> None:
        super().__init__()
        self.world, self.layout, self.dtype = world, layout, np.dtype(dtype)
        self.overlap = True  # False: the sums start after the backward pass
        self._lock = threading.Lock()  # for MPI and the state below; buckets are the main thread's until full
        self._busy = threading.Event()
        self._error: BaseException | None = None
        self.begin()
        if world.threads:
            threading.Thread(target=self._progress_loop, daemon=True).start()

    def begin(self) -> None:
        with self._lock:
            self.times = Times()
            self._missing = [sum(p.end - p.begin for p in inside) for inside in self.layout.inside]
            self._started = 0
            self._added: set[str] = set()
            self._last = False
            self._requests: list[Any] = []
            self._numbers: list[int] = []  # the buckets of the requests

    def last(self) -> None:
        self._last = True

    def add(self, name: str, grad: Array) -> None:
        started = time.perf_counter()
        flat = to_numpy(grad).reshape(-1)
        for place in self.layout.places[name]:
            part = self.part(place)
            if name in self._added:
                part += flat[place.begin : place.end]
            else:
                part[...] = flat[place.begin : place.end]
            if self._last:
                self._missing[place.bucket] -= part.size
                if self.overlap and self._missing[place.bucket] == 0:
                    self._busy.set()
        self._added.add(name)
        self.times.copying += time.perf_counter() - started

    def finish(self) -> dict[str, Array]:
        """Waits for all sums; returns those that this rank needs. Parameters without a gradient count as 0."""
        from mpi4py import MPI

        started = time.perf_counter()
        for name, places in self.layout.places.items():
            if name not in self._added:
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
        self.times.waiting += time.perf_counter() - started
        return self.result()

    def result(self) -> dict[str, Array]:
        """The sums that this rank needs, by name."""
        raise NotImplementedError

    def part(self, place: BucketSlice) -> np.ndarray:
        """A view of the buffer at a slice's position."""
        return self.buffer(place.bucket)[place.offset : place.offset + place.end - place.begin]

    def buffer(self, k: int) -> np.ndarray:
        """The buffer of bucket k."""
        raise NotImplementedError

    def start(self, k: int) -> Any:
        """Starts the sum of bucket k over the ranks; returns the MPI request."""
        raise NotImplementedError

    def done(self, k: int) -> None:
        """Called when the sum of bucket k is complete."""

    def _progress_loop(self) -> None:
        """The thread: starts sums, and polls MPI while any are in flight."""
        while self._error is None:
            self._busy.wait()
            with self._lock:
                started = time.thread_time()
                self._busy.clear()
                try:
                    self._start_full()
                    self._poll()
                except BaseException as error:  # the main thread raises it
                    self._error = error
                if self._requests:
                    self._busy.set()
                self.times.moving += time.thread_time() - started
            time.sleep(POLL_SECONDS)

    def _start_full(self) -> None:
        """Starts the sums of full buckets in order, which must be the same on all ranks."""
        while self._started < len(self._missing) and self._missing[self._started] == 0:
            k = self._started
            self.buffer(k)[sum(p.end - p.begin for p in self.layout.inside[k]) :] = 0  # padding
            self._requests.append(self.start(k))
            self._numbers.append(k)
            self._started += 1

    def _poll(self) -> None:
        """Lets MPI make progress on the sums in flight."""
        from mpi4py import MPI

        for i in sorted(MPI.Request.Testsome(self._requests) or [], reverse=True):
            del self._requests[i]
            self.done(self._numbers.pop(i))


class AllReduceGradients(BucketedGradients):
    """All-reduce: every rank receives all sums, for an unsharded optimizer."""

    def __init__(self, world: World, layout: BucketLayout, model: Model) -> None:
        super().__init__(world, layout, model.dtype)
        self.vector = np.zeros(sum(layout.lengths), self.dtype)
        self.grads: dict[str, Array] = {}
        for name, places in layout.places.items():
            begin = places[0].bucket * layout.bucket + places[0].offset
            part = self.vector[begin : begin + places[-1].end]
            self.grads[name] = model.engine.floats(part.reshape(layout.shapes[name]), model.dtype)  # a view

    def result(self) -> dict[str, Array]:
        return self.grads

    def buffer(self, k: int) -> np.ndarray:
        begin = k * self.layout.bucket
        return self.vector[begin : begin + self.layout.lengths[k]]

    def start(self, k: int) -> Any:
        from mpi4py import MPI

        return self.world.comm.Iallreduce(MPI.IN_PLACE, self.buffer(k))


class ReduceScatterGradients(BucketedGradients):
    """Reduce-scatter: every rank receives its part of each bucket. Buffers of completed buckets are reused."""

    def __init__(self, world: World, layout: BucketLayout, model: Model) -> None:
        super().__init__(world, layout, model.dtype)
        self.shard = np.zeros(layout.shard, self.dtype)
        self._buffers: dict[int, np.ndarray] = {}
        self._free: list[np.ndarray] = []

    def result(self) -> dict[str, Array]:
        return {SHARD: self.shard}

    def total_squares(self, squares: np.ndarray) -> float:
        return float(squares.sum())

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
        """Bytes of all buffers: the most buckets that were in flight at once."""
        return sum(b.nbytes for b in [*self._free, *self._buffers.values()])
