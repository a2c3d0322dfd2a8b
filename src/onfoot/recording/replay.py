"""Runs a recording: assigns memory to its buffers, then runs its list of calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from onfoot.kernels import buffers
from onfoot.kernels.update import sum_into_first
from onfoot.recording import pool
from onfoot.recording.recorder import ARENA, RESULT, Event, Recording

BATCH = 1 << 22  # bytes of results that are returned together
SLICE = 0.05  # seconds between returns to Python, which handles Ctrl-C and switches threads
TINY = 1 << 21  # bytes: up to this much work, one thread is as fast as several
OnResult = Callable[[Event, np.ndarray], None]


class Replay:
    """A recording with memory for its inputs; for one Python thread at a time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._frames = recording.frames.copy()
        addresses = self._frames.ctypes.data + 8 * recording.begins
        self._table = np.stack([recording.code, addresses], axis=1).copy()
        self._bases = np.zeros(len(recording.kinds), np.int64)
        self._memory: dict[int, np.ndarray] = {}
        self.inputs: list[tuple[Any, np.ndarray]] = []
        for slot in recording.inputs:
            memory = buffers.pool.empty((max(1, int(recording.sizes[slot.view.buffer])),), np.uint8)
            self._memory[slot.view.buffer] = memory
            self._bases[slot.view.buffer] = memory.ctypes.data
            self.inputs.append((slot.key, slot.view.of(memory)))
        self._chunk = 64  # calls between two returns to Python

    @property
    def table(self) -> np.ndarray:
        """The calls as the native loop reads them."""
        return self._table

    def arena(self) -> np.ndarray:
        """New memory for the temporary buffers."""
        return buffers.pool.empty((max(1, self.recording.arena),), np.uint8)

    def use_arena(self, arena: np.ndarray) -> None:
        """Places the temporary buffers in an arena."""
        passing = self.recording.kinds == ARENA
        self._bases[passing] = arena.ctypes.data + self.recording.begin[passing]

    def put(self, buffer: int, memory: np.ndarray) -> None:
        """Places a result in `memory`."""
        self._memory[buffer] = memory
        self._bases[buffer] = memory.ctypes.data

    def write_addresses(self) -> None:
        """Writes all addresses into the calls."""
        r = self.recording
        self._frames[r.moved] = self._bases[r.moved_buffer] + r.moved_offset

    def array(self, event: Event) -> np.ndarray:
        """The array of a result."""
        return event.view.of(self._memory[event.view.buffer])

    def drop(self) -> None:
        """Drops the references to the results: they belong to the caller."""
        for buffer in [b for b in self._memory if self.recording.kinds[b] == RESULT]:
            del self._memory[buffer]

    def run(self, on_result: OnResult, as_final: bool) -> None:
        """Runs all calls. `on_result` gets each result: with `as_final` soon after it is final, else at the end."""
        r, begin, done = self.recording, 0, 0
        threads = 1 if r.work < TINY else pool.threads()
        arena = self.arena()
        self.use_arena(arena)
        try:
            for cut in self._cuts if as_final else [len(r.code)]:
                for buffer in self._begun(begin, cut):
                    self.put(buffer, buffers.pool.empty((max(1, int(r.sizes[buffer])),), np.uint8))
                lo, hi = np.searchsorted(r.moved_call, (begin, cut))
                self._frames[r.moved[lo:hi]] = self._bases[r.moved_buffer[lo:hi]] + r.moved_offset[lo:hi]
                self._run_calls(begin, cut, threads)
                begin = cut
                while done < len(r.events) and r.events[done].calls <= cut:
                    event = r.events[done]
                    array = self.array(event)
                    if event.view.buffer not in self._later[done]:
                        del self._memory[event.view.buffer]  # from here on, it belongs to `on_result`
                    done += 1
                    on_result(event, array)
                    del array
        finally:
            self.drop()

    def _run_calls(self, begin: int, end: int, threads: int) -> None:
        """Runs some of the calls, returning to Python from time to time for Ctrl-C and other Python threads."""
        while begin < end:
            upto = min(end, begin + self._chunk)
            before = time.perf_counter()
            run_list(self._table[begin:upto], min(threads, pool.threads()))  # the pool may have shrunk
            took = time.perf_counter() - before
            if took > SLICE:
                self._chunk = max(1, self._chunk // 2)
            elif took < SLICE / 4:
                self._chunk = min(2 * self._chunk, len(self._table))
            begin = upto

    def _begun(self, begin: int, end: int) -> list[int]:
        """The results that are first written by one of these calls."""
        r = self.recording
        return [int(b) for b in self._results if begin <= r.first[b] < end]

    @cached_property
    def _results(self) -> np.ndarray:
        return np.flatnonzero(self.recording.kinds == RESULT)

    @cached_property
    def _later(self) -> list[set[int]]:
        """For each event, the buffers that a later one needs."""
        buffers_of = [event.view.buffer for event in self.recording.events]
        return [set(buffers_of[i + 1 :]) for i in range(len(buffers_of))]

    @cached_property
    def _cuts(self) -> list[int]:
        return cuts(self.recording)


def cuts(recording: Recording) -> list[int]:
    """Where to cut the list of calls so that results are returned early; small ones are batched."""
    made, waiting = [], 0
    for event in recording.events:
        waiting += int(recording.sizes[event.view.buffer])
        if waiting >= BATCH:
            made.append(event.calls)
            waiting = 0
    return sorted({*made, len(recording.code)})


def results_at_peak(recording: Recording) -> int:
    """The peak in bytes of results alive at once, if each is freed as soon as it is returned."""
    r, begin, alive, most = recording, 0, 0, 0
    last = {event.view.buffer: event.calls for event in r.events}
    for cut in cuts(r):
        alive += sum(int(r.sizes[b]) for b in last if begin <= r.first[b] < cut)
        most = max(most, alive)
        alive -= sum(int(r.sizes[b]) for b, calls in last.items() if begin < calls <= cut)
        begin = cut
    return most


def run_list(table: np.ndarray, threads: int) -> None:
    """Runs calls one after the other, each on all threads."""
    assert pool.native.run is not None
    pool.native.run(table.ctypes.data, len(table), threads, 0)


def run_each(tables: Sequence[np.ndarray]) -> None:
    """Runs one list per thread, in parallel and without barriers."""
    assert pool.native.run is not None
    if pool.threads() < len(tables):  # the pool has shrunk since the lists were made
        for table in tables:
            run_list(table, 1)
        return
    lists = np.array([[table.ctypes.data, len(table)] for table in tables], np.int64)
    pool.native.run(lists.ctypes.data, len(tables), len(tables), 1)


def result_layout(recording: Recording) -> tuple[Any, ...]:
    """The results of a recording and their memory layout, with buffers numbered in order of appearance."""
    numbers: dict[int, int] = {}
    return tuple(
        (e.name, numbers.setdefault(e.view.buffer, len(numbers)), int(recording.sizes[e.view.buffer]), *e.view[1:])
        for e in recording.events
    )


def run_per_thread(replays: Sequence[Replay], loss: str, on_result: OnResult) -> None:
    """Replays one step per thread, then sums the results. The one named `loss` is a float64."""
    first = replays[0].recording
    results = [list(dict.fromkeys(e.view.buffer for e in replay.recording.events)) for replay in replays]
    single = next(e.view.buffer for e in first.events if e.name == loss)
    at = results[0].index(single)
    sizes = [0 if b == single else -(-int(first.sizes[b]) // 64) * 64 for b in results[0]]
    begins = np.cumsum([0, *sizes]).tolist()
    parts = buffers.pool.empty((len(replays), sum(sizes) // 4))
    losses = np.zeros((len(replays), 8))
    arenas = []
    for i, replay in enumerate(replays):
        arenas.append(replay.arena())
        replay.use_arena(arenas[-1])
        for n, buffer in enumerate(results[i]):
            replay.put(buffer, losses[i].view(np.uint8) if n == at else parts[i].view(np.uint8)[begins[n] :])
        replay.write_addresses()
    try:
        run_each([replay.table for replay in replays])
        sum_into_first(parts)
        losses[0, 0] = losses[:, 0].sum()
        for event in first.events:
            on_result(event, replays[0].array(event))
    finally:
        for replay in replays:
            replay.drop()


@contextlib.contextmanager
def if_free(lock: Any) -> Iterator[bool]:
    """Tries to acquire a lock without waiting; yields whether it was acquired."""
    free = lock.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            lock.release()
