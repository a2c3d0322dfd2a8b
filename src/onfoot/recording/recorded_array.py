"""Arrays of a step that is being recorded: shapes, strides and addresses, but no values.

They are in address space that has no memory, so NumPy can make views of them as of any array. Reading or writing
values outside a kernel is refused: it would happen once, while recording, and never at a replay.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NoReturn

import numpy as np

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which Python names only from 3.13 on


class CannotRecord(Exception):  # noqa: N818 (not an error: the step runs without a recording)
    """Something that a recording cannot repeat; the step runs without one."""


class _Active(threading.local):
    """The recorder of the kernel calls of this Python thread, or None."""

    recorder: Any = None


active = _Active()
VIEWS = {np.broadcast_to, np.shape, np.ndim, np.size, np.swapaxes}
NO_COPY: dict[str, Any] = {"copy": False} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {}
METHODS = {"copy", "reshape", "squeeze", "swapaxes", "transpose", "view"}  # these read no values


class RecordedArray(np.ndarray):
    """An array of a recording. Views work, and `reshape` copies with a kernel where it must; all else is refused."""

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise CannotRecord(f"{ufunc.__name__} is computed by NumPy")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in VIEWS:
            raise CannotRecord(f"{func.__name__} is computed by NumPy")
        made = super().__array_function__(func, types, args, kwargs)
        return made.view(RecordedArray) if isinstance(made, np.ndarray) else made

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is Ellipsis or type(part) in (int, np.int64, slice) for part in parts):
            raise CannotRecord(f"values are indexed by {key!r}")
        made = super().__getitem__(key)
        if not isinstance(made, RecordedArray):
            raise CannotRecord(f"a value is read at {key!r}")
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, int | float):
            raise CannotRecord("values are copied by NumPy")
        active.recorder.fill(self[key], value)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise CannotRecord("values are reordered by NumPy")
        try:
            made = super().reshape(*shape, **NO_COPY)
        except ValueError:  # not possible as a view, or not a valid shape
            if self.flags.c_contiguous:
                raise
            return active.recorder.copied(self).reshape(*shape)
        return made if data_address(made) == data_address(self) else active.recorder.copied(self).reshape(*shape)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def copy(self, order: Any = "C") -> Any:
        return active.recorder.copied(self)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CannotRecord("values are read or written by NumPy")

    __float__ = __int__ = __complex__ = __bool__ = __index__ = __contains__ = _refuse
    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __dlpack__ = __repr__ = __str__ = _refuse
    flat = imag = property(_refuse)


for _name in {name for name, made in vars(np.ndarray).items() if callable(made) and name[0] != "_"} - METHODS:
    setattr(RecordedArray, _name, RecordedArray._refuse)


def data_address(x: np.ndarray) -> int:
    """The address of an array's first element."""
    return int(x.__array_interface__["data"][0])
