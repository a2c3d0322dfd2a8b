"""A memory pool.

Fresh memory is slow: the system clears every page when it is first touched, and in a virtual machine that can cost
more than the computation. So results of kernels are in large arenas, and the block of an array that is no longer
referenced is reused. Nothing has to be freed by hand: a block is free when its last array or view is gone, and not
before. Arenas request huge pages, which save the CPU most of its TLB misses.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from bisect import bisect, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

from onfoot.recording.recorded_array import NO_RESERVE, active

FLOAT32 = np.dtype(np.float32)
ARENA = 1 << 28  # bytes, on systems that cannot reserve address space without memory
PAGE = 1 << 21  # a huge page
GRAIN = 1 << 8  # block sizes are multiples of this
TINY = 1 << 15  # bytes: up to this size, malloc is as good
HUGE = 1 << 24  # blocks from this size on are searched for among all free ones
SMALL = 1 << 21  # blocks below this size are kept by size, to be found at once


class _Block(ctypes.c_char * (1 << 46)):  # type: ignore[misc]
    """Memory from some address on, of any length; returned to the pool when no array uses it any more."""

    home: list[int]  # free blocks of this size

    def __del__(self) -> None:  # may run at any time
        self.home.append(ctypes.addressof(self))


class Pool:
    """Allocates arrays from arenas that grow with the memory in use at a time, not with all that was ever allocated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # (address, size), by address
        self._small: dict[int, list[int]] = {}  # size -> addresses of free blocks
        self._large: dict[int, list[int]] = {}
        self._arenas: list[np.ndarray] = []

    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """An uninitialised array."""
        kind = FLOAT32 if dtype is np.float32 else np.dtype(dtype)
        size = kind.itemsize * math.prod(shape)
        if size <= TINY:
            return np.empty(shape, kind)
        size = (size + GRAIN - 1) // GRAIN * GRAIN
        if size < SMALL:
            home = self._small.get(size) or self._small.setdefault(size, [])
            try:
                start = home.pop()
            except IndexError:
                start = self._find(size)
        else:
            home = self._large.setdefault(size, [])
            start = self._find(size)
        block = _Block.from_address(start)
        block.home = home
        return np.ndarray(shape, kind, block)

    def _find(self, size: int) -> int:
        with self._lock:
            self._take_back(self._large)
            if size >= HUGE:
                self._take_back(self._small)  # returning them may join blocks to one that is large enough
            return self._cut(size)

    def _take_back(self, blocks: dict[int, list[int]]) -> None:
        for size, starts in list(blocks.items()):
            with contextlib.suppress(IndexError):  # empty: another thread took the last one
                while True:
                    self._release(starts.pop(), size)

    def _release(self, start: int, size: int) -> None:
        """Adds a free block, merged with its free neighbours."""
        at = bisect(self._free, (start, 0))
        if at < len(self._free) and self._free[at][0] == start + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == start:
            at -= 1
            before, length = self._free.pop(at)
            start, size = before, size + length
        insort(self._free, (start, size))

    def _cut(self, size: int) -> int:
        """The lowest free block that is large enough: low memory is reused, high memory stays untouched."""
        for attempt in range(3):
            for at, (start, length) in enumerate(self._free):
                if length >= size:
                    if length == size:
                        self._free.pop(at)
                    else:
                        self._free[at] = (start + size, length - size)
                    return start
            if attempt == 0:
                self._take_back(self._small)
            else:
                self._grow(size)
        raise MemoryError(f"cannot allocate {size} bytes")

    def _grow(self, size: int) -> None:
        """Adds an arena. The first is as large as the machine's memory: pages that are never touched cost nothing."""
        need = (size + 2 * PAGE - 1) // PAGE * PAGE
        memory = None
        if sys.platform == "linux" and not self._arenas:
            with contextlib.suppress(OSError, ValueError):
                length = max(need, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // PAGE * PAGE)
                memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        if memory is None:
            length = max(ARENA, need)
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
            memory = mmap.mmap(-1, length, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        view = np.frombuffer(memory, dtype=np.uint8)
        self._arenas.append(view)
        begin = (view.ctypes.data + PAGE - 1) // PAGE * PAGE
        self._release(begin, view.ctypes.data + length - begin)


pool = Pool()


def empty(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """An uninitialised array; while recording, a buffer of the recording."""
    recorder = active.recorder
    return pool.empty(shape, dtype) if recorder is None else recorder.empty(shape, dtype)


if hasattr(os, "register_at_fork"):  # a child process never starts in the middle of a change
    os.register_at_fork(
        before=pool._lock.acquire, after_in_parent=pool._lock.release, after_in_child=pool._lock.release
    )


def copy(x: np.ndarray, dtype: Any) -> np.ndarray:
    """A copy of `x` from the pool, in C order: from huge pages, weights are read up to 1.5 times as fast."""
    made = empty(x.shape, dtype)
    made[...] = x
    return made


class _Scratch(threading.local):
    """Working memory of one Python thread, by the number of threads that its kernels run on."""

    def __init__(self) -> None:
        self.held: dict[int, np.ndarray] = {}


_scratch = _Scratch()


def scratch(threads: int, floats: int) -> np.ndarray:
    """Working memory for each thread of a kernel, (threads, at least `floats`), per Python thread.

    Its contents are valid until the same Python thread calls this again.
    """
    if active.recorder is not None:
        return active.recorder.empty((threads, -(-floats // GRAIN) * GRAIN))
    held = _scratch.held.get(threads)
    if held is None or held.shape[1] < floats:
        _scratch.held.pop(threads, None)
        held = _scratch.held[threads] = empty((threads, -(-floats // GRAIN) * GRAIN))  # each row starts on a cache line
    return held
