"""Notes the kernel calls of a step, with the buffers they read and write."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from onfoot.recording.plan import LINE, places
from onfoot.recording.planned import NO_RESERVE, NotRecorded, Planned, active, place

SPACE = 1 << 36  # bytes of address space that are asked for at a time
MOST_INPUTS = 1 << 28  # bytes: dropout patterns of long sequences are better drawn one by one
ARENA, INPUT, RESULT = range(3)  # what a buffer is: passing, given before each replay, or handed out after it


def pages_in_memory(begin: int, end: int) -> int:
    """How many pages from one address to another have memory behind them; 0 where the system does not tell."""
    tell = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mincore", None)
    pages = np.zeros(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
    if tell is None or tell(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_void_p(pages.ctypes.data)):
        return 0
    return int((pages & 1).sum())


class View(NamedTuple):
    """An array in one of a recording's buffers."""

    buffer: int
    offset: int  # bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def of(self, memory: np.ndarray) -> np.ndarray:
        """The same in real memory, which begins where the buffer does."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class Event(NamedTuple):
    """Something that is final when so many calls have been made."""

    calls: int
    name: str
    view: View


class Input(NamedTuple):
    """What has to be filled in before a replay."""

    view: View
    key: Any  # what it is: a name, or how it is made


class Recording(NamedTuple):
    """A step as a list of calls, and where everything lies that they read and write."""

    code: np.ndarray  # of each call, where its machine code is
    frames: np.ndarray  # the calls' arguments in 64-bit words, one after the other
    begins: np.ndarray  # of each call, where its arguments begin in `frames`
    moved: np.ndarray  # places in `frames` that hold an address in a buffer
    moved_buffer: np.ndarray  # which buffer
    moved_offset: np.ndarray  # how far behind its begin, in bytes
    moved_call: np.ndarray  # whose argument it is
    kinds: np.ndarray  # of each buffer: ARENA, INPUT or RESULT
    sizes: np.ndarray  # in bytes
    first: np.ndarray  # the first call that uses it
    last: np.ndarray
    begin: np.ndarray  # where it begins in the arena, if it lies there
    arena: int  # bytes
    inputs: list[Input]
    events: list[Event]
    held: list[Any]  # arrays outside that the calls read, as parameters
    work: int  # bytes that all calls together read or write, at most

    def bytes_of(self, kind: int) -> int:
        """The bytes in all buffers of a kind."""
        return int(self.sizes[self.kinds == kind].sum())


class Recorder:
    """Takes the place of memory and of kernels while a step is recorded."""

    def __init__(self, threads: int, most_inputs: int = MOST_INPUTS) -> None:
        self.threads = threads
        self._room_for_inputs = most_inputs
        self._patterns: dict[Any, Any] = {}  # inputs that are asked for again where a block is computed again
        self._spaces: list[tuple[int, int, Any]] = []  # address space: begin, end, and what holds it
        self._next = self._end = 0
        self._begins: list[int] = []  # of each buffer
        self._sizes: list[int] = []
        self._inputs: list[Input] = []
        self._events: list[Event] = []
        self._calls: list[tuple[Any, np.ndarray]] = []
        self._held: list[Any] = []
        self._work = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Kernel calls of this thread are noted, not made."""
        if active.recorder is not None:
            raise NotRecorded("another step is being recorded")
        active.recorder = self
        try:
            yield
        finally:
            active.recorder = None

    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> Any:
        """An array in a buffer of its own."""
        kind = np.dtype(dtype)
        size = kind.itemsize * math.prod(shape)
        begin = self._address(size)
        self._begins.append(begin)
        self._sizes.append(size)
        memory = (ctypes.c_char * max(size, 1)).from_address(begin)
        return np.ndarray(shape, kind, memory).view(Planned)

    def _address(self, size: int) -> int:
        room = (size + LINE) // LINE * LINE
        if self._next + room > self._end:
            length = max(SPACE, room)
            try:
                space = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            except (AttributeError, OSError, ValueError) as error:  # Windows has no such flags
                raise NotRecorded(f"no address space for it: {error}") from None
            self._next = ctypes.addressof(ctypes.c_char.from_buffer(space))
            self._end = self._next + length
            self._spaces.append((self._next, self._end, space))
        begin, self._next = self._next, self._next + room
        return begin

    def _touched(self) -> bool:
        """Whether anyone has read or written numbers: NumPy does it unasked in `plain[...] = planned`, for example."""
        page = mmap.PAGESIZE
        for begin, end, _ in self._spaces:
            used = self._next if end == self._end else end
            if pages_in_memory(begin, used) and not pages_in_memory(end - page, end):  # not a system that says "all"
                return True
        return False

    def input(self, shape: Sequence[int], dtype: Any, key: Any) -> Any:
        """An array that is filled in before each replay; the same one for the same key."""
        if key not in self._patterns:
            made = self.empty(shape, dtype)
            self._room_for_inputs -= self._sizes[-1]
            if self._room_for_inputs < 0:
                raise NotRecorded("its inputs are too large to exist all at once")
            self._inputs.append(Input(self._view(made), key))
            self._patterns[key] = made
        return self._patterns[key]

    def event(self, name: str, array: np.ndarray) -> None:
        """Notes that an array is final: it is handed out."""
        self._events.append(Event(len(self._calls), name, self._view(array)))

    def call(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Notes a call."""
        self._calls.append((kernel, kernel.frame(args, self.threads)))
        arrays = [x for x in args if isinstance(x, np.ndarray)]
        self._held += arrays
        self._work += sum(x.nbytes for x in arrays)

    def copied(self, x: np.ndarray) -> Any:
        """A contiguous copy, by a kernel."""
        from onfoot.kernels.shapes import copied

        if x.dtype != np.float32 or x.ndim > 4:
            raise NotRecorded("there is no kernel that copies it")
        return copied(x)

    def fill(self, x: np.ndarray, value: float) -> None:
        """Sets all numbers, by a kernel."""
        from onfoot.kernels.shapes import filled

        if x.dtype != np.float32 or not x.flags.c_contiguous:
            raise NotRecorded("there is no kernel that fills it")
        filled(x, value)

    def _buffer(self, address: int) -> int:
        """The buffer that an address lies in, or −1 for memory outside."""
        if not any(begin <= address < end for begin, end, _ in self._spaces):
            return -1
        return self._order[bisect_right(self._sorted, address) - 1]

    def _view(self, x: np.ndarray) -> View:
        self._sort()
        at = place(x)
        buffer = self._buffer(at)
        if buffer < 0:
            raise NotRecorded("what is handed out lies outside the recording")
        return View(buffer, at - self._begins[buffer], x.shape, x.strides, x.dtype)

    def _sort(self) -> None:
        self._order = sorted(range(len(self._begins)), key=self._begins.__getitem__)
        self._sorted = [self._begins[i] for i in self._order]

    def finish(self) -> Recording:
        """The step, planned."""
        if self._touched():
            raise NotRecorded("numbers were read or written by NumPy")
        self._sort()
        count, end = len(self._begins), len(self._calls)
        kinds = np.full(count, ARENA)
        kinds[[i.view.buffer for i in self._inputs]] = INPUT
        kinds[[e.view.buffer for e in self._events]] = RESULT
        first, last = np.full(count, end), np.full(count, -1)
        begins = np.cumsum([0, *(frame.size for _, frame in self._calls)])
        moved: list[tuple[int, int, int, int]] = []
        for n, (kernel, frame) in enumerate(self._calls):
            for kind, at in zip(kernel.kinds, kernel.places, strict=False):
                if "[" not in kind:
                    continue
                address = int(frame[at])
                buffer = self._buffer(address)
                if buffer < 0:
                    continue
                moved.append((int(begins[n]) + at, buffer, address - self._begins[buffer], n))
                first[buffer], last[buffer] = min(first[buffer], n), n
        for event in self._events:
            if last[event.view.buffer] >= event.calls:
                raise NotRecorded(f"{event.name} is used again after it was handed out")
        last[[e.view.buffer for e in self._events]] = end
        table = np.array(moved, np.int64).reshape(-1, 4)
        sizes = np.array(self._sizes, np.int64)
        used = np.flatnonzero((kinds == ARENA) & (last >= 0))
        begin = np.zeros(count, np.int64)
        begin[used], arena = places(sizes[used], first[used], last[used])
        return Recording(
            np.array([kernel.code for kernel, _ in self._calls], np.int64),
            np.concatenate([frame for _, frame in self._calls]) if self._calls else np.empty(0, np.int64),
            begins[:-1].astype(np.int64),
            table[:, 0].copy(),
            table[:, 1].copy(),
            table[:, 2].copy(),
            table[:, 3].copy(),
            kinds,
            sizes,
            first,
            last,
            begin,
            arena,
            self._inputs,
            self._events,
            [x for x in self._held if not isinstance(x, Planned) or self._buffer(place(x)) < 0],
            self._work,
        )
