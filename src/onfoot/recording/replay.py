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


class Pace:
    """Runs calls in chunks, returning to Python between them for Ctrl-C and other Python threads."""

    def __init__(self) -> None:
        self.calls = 64  # per chunk

    def run(self, begin: int, end: int, work: Callable[[int, int], None]) -> None:
        """Calls `work(a, e)` for consecutive chunks of the calls begin ... end."""
        while begin < end:
            upto, before = min(end, begin + self.calls), time.perf_counter()
            work(begin, upto)
            took = time.perf_counter() - before
            if took > SLICE:
                self.calls = max(1, self.calls // 2)
            elif took < SLICE / 4 and upto - begin == self.calls:
                self.calls *= 2
            begin = upto


class Replay:
    """A recording with memory for its inputs; for one Python thread at a time."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._frames = recording.frames.copy()
        addresses = self._frames.ctypes.data + 8 * recording.begins
        self._table = np.stack([recording.code, addresses], axis=1).copy()
        self._bases = np.zeros(len(recording.kinds), np.int64)
        self._memory: dict[int, np.ndarray] = {}
        self.pace = Pace()

    def inputs(self) -> list[tuple[Any, np.ndarray]]:
        """Allocates the inputs of one run; returns (key, array) pairs to fill in."""
        for slot in self.recording.inputs:
            self.put(slot.view.buffer, self.allocate(slot.view.buffer))
        return [(slot.key, slot.view.of(self._memory[slot.view.buffer])) for slot in self.recording.inputs]

    def allocate(self, buffer: int) -> np.ndarray:
        """New memory of a buffer's size."""
        return buffers.pool.empty((max(1, int(self.recording.sizes[buffer])),), np.uint8)

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
        """Places an input or a result in `memory`."""
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
        """Drops the references to inputs and results: results belong to the caller."""
        self._memory.clear()

    def run(self, on_result: OnResult, as_final: bool) -> None:
        """Runs all calls. `on_result` gets each result: with `as_final` soon after it is final, else at the end."""
        r, begin, done = self.recording, 0, 0
        threads = 1 if r.work < TINY else pool.threads()
        arena = self.arena()
        self.use_arena(arena)
        try:
            for cut in self._cuts if as_final else [len(r.code)]:
                for buffer in self._begun(begin, cut):
                    self.put(buffer, self.allocate(buffer))
                lo, hi = np.searchsorted(r.moved_call, (begin, cut))
                self._frames[r.moved[lo:hi]] = self._bases[r.moved_buffer[lo:hi]] + r.moved_offset[lo:hi]
                self._run_calls(begin, cut, threads)
                begin = cut
                while done < len(r.events) and r.events[done].calls <= cut:
                    event = r.events[done]
                    array = self.array(event)
                    if self._last[event.view.buffer] == done:
                        del self._memory[event.view.buffer]  # from here on, it belongs to `on_result`
                    done += 1
                    on_result(event, array)
                    del array
        finally:
            self.drop()

    def _run_calls(self, begin: int, end: int, threads: int) -> None:
        self.pace.run(begin, end, lambda a, e: run_list(self._table[a:e], threads))

    def _begun(self, begin: int, end: int) -> list[int]:
        """The results that are first written by one of these calls."""
        r = self.recording
        return [int(b) for b in self._results if begin <= r.first[b] < end]

    @cached_property
    def _results(self) -> np.ndarray:
        return np.flatnonzero(self.recording.kinds == RESULT)

    @cached_property
    def _last(self) -> dict[int, int]:
        """For each result buffer, the index of the last event that needs it."""
        return {event.view.buffer: i for i, event in enumerate(self.recording.events)}

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
    first_part = buffers.pool.empty((sum(sizes) // 4,))  # what is handed out keeps nothing else alive
    other_parts = buffers.pool.empty((len(replays) - 1, sum(sizes) // 4))
    losses = np.zeros((len(replays), 8))
    arenas = [replay.arena() for replay in replays]
    try:
        for i, replay in enumerate(replays):
            replay.use_arena(arenas[i])
            part = first_part if i == 0 else other_parts[i - 1]
            for n, buffer in enumerate(results[i]):
                replay.put(buffer, losses[i].view(np.uint8) if n == at else part.view(np.uint8)[begins[n] :])
            replay.write_addresses()
        end = max(len(replay.table) for replay in replays)
        replays[0].pace.run(0, end, lambda a, e: run_each([replay.table[a:e] for replay in replays]))
        sum_into_first(first_part, other_parts)
        losses[0, 0] = losses[:, 0].sum()
        for event in first.events:
            on_result(event, replays[0].array(event))
    finally:
        for replay in replays:
            replay.drop()


@contextlib.contextmanager
def if_free(lock: Any) -> Iterator[bool]:
    """Tries to acquire a lock without waiting; yields whether it was acquired."""
    free = False
    try:
        free = lock.acquire(blocking=False)
        yield free
    finally:
        if free:
            lock.release()
