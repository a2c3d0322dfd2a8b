"""The threads that kernels run on.

All parallel work runs on this one pool, and no other library's threads are woken: two pools that wait actively for
work slow each other down. What the threads do is in `native_loop`; here they are started and ended.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from onfoot.recording import native_loop
from onfoot.recording.planned import active

# What `native_loop` needs of the system: a lock, and a condition to sleep on.
POSIX = {
    "lock": "pthread_mutex_lock",
    "unlock": "pthread_mutex_unlock",
    "sleep": "pthread_cond_wait",
    "wake": "pthread_cond_broadcast",
}
WINDOWS = {
    "lock": "AcquireSRWLockExclusive",
    "unlock": "ReleaseSRWLockExclusive",
    "sleep": "SleepConditionVariableSRW",
    "wake": "WakeAllConditionVariable",
}


def system_functions() -> dict[str, int]:
    """The addresses of what `native_loop` calls, by the names it has for them."""
    windows = sys.platform == "win32"
    library: Any = ctypes.WinDLL("kernel32") if windows else ctypes.CDLL(None)  # type: ignore[attr-defined,unused-ignore]
    names = WINDOWS if windows else POSIX
    return {
        f"onfoot_{name}": ctypes.cast(getattr(library, real), ctypes.c_void_p).value or 0
        for name, real in names.items()
    }


def _asked() -> int:
    """What the environment asks for, or one thread per core."""
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    """The native pool of this process, once its code is loaded."""

    def __init__(self) -> None:
        self.run: Callable[[int, int, int, int], None] | None = None
        self.started = 1  # threads that exist, the one that calls included
        self._workers: list[threading.Thread] = []  # thread 1 and those behind it
        self._worker: Any = None
        self._stir: Any = None
        self._state: Any = None

    def load(self, address: Callable[[str], int]) -> None:
        """Takes the functions of `native_loop` from where they have been loaded."""
        long = ctypes.c_longlong
        where = ctypes.PYFUNCTYPE(long)(address(native_loop.STATE))()
        self._state = (long * native_loop.WORDS).from_address(where)
        self._make_lock()
        self._worker = ctypes.CFUNCTYPE(None, long, long)(address(native_loop.WORKER))
        self._stir = ctypes.PYFUNCTYPE(None)(address(native_loop.STIR))
        self.run = ctypes.PYFUNCTYPE(None, *[long] * 4)(address(native_loop.SYMBOL))

    def _make_lock(self) -> None:
        if sys.platform == "win32":
            return  # zeros are right there
        library, at = ctypes.CDLL(None), ctypes.addressof(self._state)
        for word, make in (
            (native_loop.LOCK, library.pthread_mutex_init),
            (native_loop.NEW_JOB, library.pthread_cond_init),
            (native_loop.NEW_OPENING, library.pthread_cond_init),
        ):
            if make(ctypes.c_void_p(at + 8 * word), None):
                raise ImportError("the system gives no lock for threads")

    def start(self, n: int) -> None:
        """Lets there be n threads, if the code is loaded. Jobs are never for more threads than there are."""
        if self._worker is None:
            return
        state = self._state
        if n < self.started:
            state[native_loop.ACTIVE] = state[native_loop.LIMIT] = self.started = n
            ended, self._workers = self._workers[n - 1 :], self._workers[: n - 1]
            self._stir()
            for worker in ended:
                worker.join()  # or its number would be given to another while it still waits for jobs
        while self.started < n:
            state[native_loop.LIMIT] = self.started + 1  # before it looks, and would end
            args = self.started, state[native_loop.JOB]
            worker = threading.Thread(target=self._worker, args=args, name=f"onfoot-{self.started}", daemon=True)
            worker.start()
            self._workers.append(worker)
            self.started += 1
        while state[native_loop.READY] < n - 1:  # whoever runs a job holds Python's lock, which a thread needs to begin
            time.sleep(1e-4)
        state[native_loop.ACTIVE] = n

    def forget(self) -> None:
        """In a forked child: the threads are its parent's, and the lock may have been theirs at that moment."""
        self.started, self._workers = 1, []
        if self._state is not None:
            ctypes.memset(ctypes.addressof(self._state), 0, ctypes.sizeof(self._state))
            self._make_lock()


native = _Pool()
_changing = threading.Lock()  # one change of the number of threads at a time
_threads = _asked()
_most = max(_threads, os.cpu_count() or 1)


def _one_thread() -> None:
    """A forked child has none of its parent's threads, and computes on its own."""
    global _threads, _most, _changing
    _threads = _most = 1
    _changing = threading.Lock()
    native.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread)


def threads() -> int:
    """How many threads kernels run on; those of a step that is being recorded, on as many as it is recorded for."""
    recorder = active.recorder
    return _threads if recorder is None else recorder.threads


def set_threads(n: int) -> None:
    """Lets kernels run on n threads, or on as many as there are cores."""
    global _threads
    with _changing:
        n = max(1, min(n, _most))
        _threads = min(n, _threads)
        native.start(n)
        _threads = n
