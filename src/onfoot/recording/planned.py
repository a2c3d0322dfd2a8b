"""Arrays of a step that is being recorded: shapes, strides and places, but no numbers.

They lie in address space with no memory behind it, so NumPy makes views of them as of any array. What would read or
write numbers outside a kernel is refused: it would be done once, while recording, and never again.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

import numpy as np

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python names only from 3.13 on


class NotRecorded(Exception):  # noqa: N818 (no error: the step runs without a recording)
    """Something that a recording cannot repeat; the step runs without one."""


class _Active(threading.local):
    """Who records the kernel calls of this thread of Python's, if anyone does."""

    recorder: Any = None


active = _Active()
VIEWS = {np.broadcast_to, np.shape, np.ndim, np.size, np.swapaxes}
NO_COPY: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}
METHODS = {"copy", "reshape", "squeeze", "swapaxes", "transpose", "view"}  # those that read no numbers


class Planned(np.ndarray):
    """An array of a recording. Views work, and `reshape` copies by a kernel where it must; anything else is refused."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotRecorded(f"{ufunc.__name__} is computed by NumPy")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in VIEWS:
            raise NotRecorded(f"{func.__name__} is computed by NumPy")
        made = super().__array_function__(func, types, args, kwargs)
        return made.view(Planned) if isinstance(made, np.ndarray) else made

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is Ellipsis or type(part) in (int, np.int64, slice) for part in parts):
            raise NotRecorded(f"numbers are chosen by {key!r}")
        made = super().__getitem__(key)
        if not isinstance(made, Planned):
            raise NotRecorded(f"a number is read at {key!r}")
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, int | float):
            raise NotRecorded("numbers are copied by NumPy")
        active.recorder.fill(self[key], value)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise NotRecorded("numbers are put into another order by NumPy")
        try:
            made = super().reshape(*shape, **NO_COPY)
        except ValueError:  # there is no such view, or no such shape at all
            if self.flags.c_contiguous:
                raise
            return active.recorder.copied(self).reshape(*shape)
        return made if place(made) == place(self) else active.recorder.copied(self).reshape(*shape)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def copy(self, order: Any = "C") -> Any:
        return active.recorder.copied(self)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotRecorded("numbers are read or written by NumPy")

    __float__ = __int__ = __complex__ = __bool__ = __index__ = __contains__ = _refuse
    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __dlpack__ = __repr__ = __str__ = _refuse
    flat = imag = property(_refuse)


for _name in {name for name, made in vars(np.ndarray).items() if callable(made) and name[0] != "_"} - METHODS:
    setattr(Planned, _name, Planned._refuse)


def place(x: np.ndarray) -> int:
    """Where an array's numbers begin."""
    return int(x.__array_interface__["data"][0])
