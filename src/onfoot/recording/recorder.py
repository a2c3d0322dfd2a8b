"""Records the kernel calls of a step, with the buffers they read and write."""

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

from onfoot.recording.plan import LINE, assign_offsets
from onfoot.recording.recorded_array import NO_RESERVE, CannotRecord, RecordedArray, active, data_address

SPACE = 1 << 36  # bytes of address space reserved at a time
MAX_INPUTS = 1 << 28  # bytes: dropout patterns of long sequences are drawn one by one instead, unrecorded
ARENA, INPUT, RESULT = range(3)  # kinds of buffers: temporary, filled before each replay, or returned by it


def pages_in_memory(begin: int, end: int) -> int:
    """The number of resident pages between two addresses; 0 where the system cannot tell."""
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
        """The same view in `memory`, which starts where the buffer does."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class Event(NamedTuple):
    """A result that is final after this many calls."""

    calls: int
    name: str
    view: View


class Input(NamedTuple):
    """An array to fill in before each replay."""

    view: View
    key: Any  # a name, or how to compute it


class Recording(NamedTuple):
    """A step as a list of calls, with the buffers that they read and write."""

    code: np.ndarray  # the address of each call's machine code
    frames: np.ndarray  # the calls' arguments in 64-bit words, one after the other
    begins: np.ndarray  # where each call's arguments start in `frames`
    moved: np.ndarray  # indices into `frames` of the words that hold an address in a buffer
    moved_buffer: np.ndarray  # which buffer
    moved_offset: np.ndarray  # offset in it, in bytes
    moved_call: np.ndarray  # the call that it is an argument of
    kinds: np.ndarray  # of each buffer: ARENA, INPUT or RESULT
    sizes: np.ndarray  # in bytes
    first: np.ndarray  # the first call that uses it
    last: np.ndarray
    begin: np.ndarray  # its offset in the arena, if it is there
    arena: int  # bytes
    inputs: list[Input]
    events: list[Event]
    held: list[Any]  # arrays outside the buffers that the calls use, such as parameters
    work: int  # bytes that all calls read or write, an upper bound

    def bytes_of(self, kind: int) -> int:
        """The total size in bytes of all buffers of a kind."""
        return int(self.sizes[self.kinds == kind].sum())


class Recorder:
    """Stands in for memory and kernels while a step is recorded."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._room_for_inputs = MAX_INPUTS
        self._by_key: dict[Any, Any] = {}  # inputs; a recomputed block asks for its dropout patterns again
        self._spaces: list[tuple[int, int, Any]] = []  # address space: begin, end, mmap
        self._next = self._end = 0
        self._begins: list[int] = []  # the address of each buffer
        self._sizes: list[int] = []
        self._inputs: list[Input] = []
        self._events: list[Event] = []
        self._calls: list[tuple[Any, np.ndarray]] = []
        self._held: list[Any] = []
        self._work = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """In this context, kernel calls of this Python thread are recorded, not run."""
        if active.recorder is not None:
            raise CannotRecord("another step is being recorded")
        active.recorder = self
        try:
            yield
        finally:
            active.recorder = None

    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> Any:
        """A new array in its own buffer."""
        kind = np.dtype(dtype)
        size = kind.itemsize * math.prod(shape)
        begin = self._address(size)
        self._begins.append(begin)
        self._sizes.append(size)
        memory = (ctypes.c_char * max(size, 1)).from_address(begin)
        return np.ndarray(shape, kind, memory).view(RecordedArray)

    def _address(self, size: int) -> int:
        room = (size + LINE) // LINE * LINE
        if self._next + room > self._end:
            length = max(SPACE, room)
            try:
                space = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            except (AttributeError, OSError, ValueError) as error:  # Windows does not have these flags
                raise CannotRecord(f"cannot reserve address space: {error}") from None
            self._next = ctypes.addressof(ctypes.c_char.from_buffer(space))
            self._end = self._next + length
            self._spaces.append((self._next, self._end, space))
        begin, self._next = self._next, self._next + room
        return begin

    def _touched(self) -> bool:
        """Whether values were read or written: NumPy does so silently in `plain[...] = recorded`, for example."""
        page = mmap.PAGESIZE
        for begin, end, _ in self._spaces:
            used = self._next if end == self._end else end
            if pages_in_memory(begin, used) and not pages_in_memory(end - page, end):  # some systems report all pages
                return True
        return False

    def input(self, shape: Sequence[int], dtype: Any, key: Any) -> Any:
        """An array that is filled in before each replay; the same array for the same key."""
        if key not in self._by_key:
            made = self.empty(shape, dtype)
            self._room_for_inputs -= self._sizes[-1]
            if self._room_for_inputs < 0:
                raise CannotRecord("the inputs are too large to keep all of them at once")
            self._inputs.append(Input(self._view(made), key))
            self._by_key[key] = made
        return self._by_key[key]

    def event(self, name: str, array: np.ndarray) -> None:
        """Records that an array is final: it becomes a result."""
        self._events.append(Event(len(self._calls), name, self._view(array)))

    def call(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Records a call."""
        self._calls.append((kernel, kernel.frame(args, self.threads)))
        arrays = [x for x in args if isinstance(x, np.ndarray)]
        self._held += arrays
        self._work += sum(x.nbytes for x in arrays)

    def copied(self, x: np.ndarray) -> Any:
        """A contiguous copy, made by a kernel."""
        from onfoot.kernels.shapes import copied

        if x.dtype != np.float32 or x.ndim > 4:
            raise CannotRecord("no kernel copies this array")
        return copied(x)

    def fill(self, x: np.ndarray, value: float) -> None:
        """Fills an array with one value, with a kernel."""
        from onfoot.kernels.shapes import filled

        if x.dtype != np.float32 or not x.flags.c_contiguous:
            raise CannotRecord("no kernel fills this array")
        filled(x, value)

    def _buffer(self, address: int) -> int:
        """The index of the buffer that contains an address, or −1."""
        if not any(begin <= address < end for begin, end, _ in self._spaces):
            return -1
        return self._order[bisect_right(self._sorted, address) - 1]

    def _view(self, x: np.ndarray) -> View:
        self._sort()
        at = data_address(x)
        buffer = self._buffer(at)
        if buffer < 0:
            raise CannotRecord("a result is not in a buffer of the recording")
        return View(buffer, at - self._begins[buffer], x.shape, x.strides, x.dtype)

    def _sort(self) -> None:
        self._order = sorted(range(len(self._begins)), key=self._begins.__getitem__)
        self._sorted = [self._begins[i] for i in self._order]

    def finish(self) -> Recording:
        """The recording, with memory planned."""
        if self._touched():
            raise CannotRecord("values were read or written by NumPy")
        self._sort()
        count, end = len(self._begins), len(self._calls)
        kinds = np.full(count, ARENA)
        kinds[[i.view.buffer for i in self._inputs]] = INPUT
        kinds[[e.view.buffer for e in self._events]] = RESULT
        first, last = np.full(count, end), np.full(count, -1)
        begins = np.cumsum([0, *(frame.size for _, frame in self._calls)])
        moved: list[tuple[int, int, int, int]] = []
        for n, (kernel, frame) in enumerate(self._calls):
            for kind, at in zip(kernel.kinds, kernel.offsets, strict=False):
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
                raise CannotRecord(f"{event.name} is used again after it was handed out")
        last[[e.view.buffer for e in self._events]] = end
        table = np.array(moved, np.int64).reshape(-1, 4)
        sizes = np.array(self._sizes, np.int64)
        used = np.flatnonzero((kinds == ARENA) & (last >= 0))
        begin = np.zeros(count, np.int64)
        begin[used], arena = assign_offsets(sizes[used], first[used], last[used])
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
            [x for x in self._held if not isinstance(x, RecordedArray) or self._buffer(data_address(x)) < 0],
            self._work,
        )
