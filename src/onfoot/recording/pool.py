"""The threads that kernels run on.

All parallel work runs on this one pool, and no other library's threads are woken: two pools that spin while waiting
slow each other down. `native_loop` is what the threads run; this file starts and stops them.
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
from onfoot.recording.recorded_array import active

# What `native_loop` needs from the operating system: a mutex and a condition variable.
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
    """The addresses of the system functions that `native_loop` calls, by the names it uses."""
    windows = sys.platform == "win32"
    library: Any = ctypes.WinDLL("kernel32") if windows else ctypes.CDLL(None)  # type: ignore[attr-defined,unused-ignore]
    names = WINDOWS if windows else POSIX
    return {
        f"onfoot_{name}": ctypes.cast(getattr(library, real), ctypes.c_void_p).value or 0
        for name, real in names.items()
    }


def _asked() -> int:
    """The number of threads set in the environment, or one per core."""
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    """The native thread pool of this process, once its code is loaded."""

    def __init__(self) -> None:
        self.run: Callable[[int, int, int, int], None] | None = None
        self.started = 1  # threads that exist, including the calling one
        self._workers: list[threading.Thread] = []  # threads 1, 2, ...
        self._worker: Any = None
        self._stir: Any = None
        self._state: Any = None

    def load(self, address: Callable[[str], int]) -> None:
        """Binds the functions of `native_loop`; `address` looks up a symbol."""
        long = ctypes.c_longlong
        where = ctypes.PYFUNCTYPE(long)(address(native_loop.STATE))()
        self._state = (long * native_loop.WORDS).from_address(where)
        self._make_lock()
        self._worker = ctypes.CFUNCTYPE(None, long, long)(address(native_loop.WORKER))
        self._stir = ctypes.PYFUNCTYPE(None)(address(native_loop.STIR))
        self.run = ctypes.PYFUNCTYPE(None, *[long] * 4)(address(native_loop.SYMBOL))

    def _make_lock(self) -> None:
        if sys.platform == "win32":
            return  # all zeros is a valid initial state there
        library, at = ctypes.CDLL(None), ctypes.addressof(self._state)
        for word, make in (
            (native_loop.LOCK, library.pthread_mutex_init),
            (native_loop.NEW_JOB, library.pthread_cond_init),
            (native_loop.NEW_OPENING, library.pthread_cond_init),
        ):
            if make(ctypes.c_void_p(at + 8 * word), None):
                raise ImportError("cannot initialise a mutex or condition variable")

    def start(self, n: int) -> None:
        """Starts or stops threads until there are n, if the code is loaded. No job runs on more threads than exist."""
        if self._worker is None:
            return
        state = self._state
        if n < self.started:
            state[native_loop.ACTIVE] = state[native_loop.LIMIT] = self.started = n
            ended, self._workers = self._workers[n - 1 :], self._workers[: n - 1]
            self._stir()
            for worker in ended:
                worker.join()  # otherwise a new thread could get its number while it still waits for jobs
        while self.started < n:
            state[native_loop.LIMIT] = self.started + 1  # before the thread reads it, or it would exit
            args = self.started, state[native_loop.JOB]
            worker = threading.Thread(target=self._worker, args=args, name=f"onfoot-{self.started}", daemon=True)
            worker.start()
            self._workers.append(worker)
            self.started += 1
        while state[native_loop.READY] < n - 1:  # a running job holds the GIL, which a new thread needs
            time.sleep(1e-4)
        state[native_loop.ACTIVE] = n

    def forget(self) -> None:
        """Resets the pool in a forked child: the threads exist only in the parent, and one may have held the lock."""
        self.started, self._workers = 1, []
        if self._state is not None:
            ctypes.memset(ctypes.addressof(self._state), 0, ctypes.sizeof(self._state))
            self._make_lock()


native = _Pool()
_changing = threading.Lock()  # held while the number of threads changes
_threads = _asked()
_most = max(_threads, os.cpu_count() or 1)


def _one_thread() -> None:
    """A forked child has none of its parent's threads; its kernels run on one."""
    global _threads, _most, _changing
    _threads = _most = 1
    _changing = threading.Lock()
    native.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread)


def threads() -> int:
    """The number of threads that kernels run on; while recording, the number that the step is recorded for."""
    recorder = active.recorder
    return _threads if recorder is None else recorder.threads


def set_threads(n: int) -> None:
    """Sets the number of threads that kernels run on, limited to the number of cores."""
    global _threads
    with _changing:
        n = max(1, min(n, _most))
        _threads = min(n, _threads)
        native.start(n)
        _threads = n
