"""What the pairs share: which arrays the kernels take, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onfoot.kernels.buffers import empty
from onfoot.kernels.jit import inner, kernel
from onfoot.recording.planned import Planned
from onfoot.recording.pool import threads

__all__ = [
    "ARRAYS",
    "FLOAT32",
    "as_rows",
    "contiguous",
    "copied",
    "copy_into",
    "filled",
    "fits",
    "formula",
    "round_up",
    "share",
    "threads",
    "upstream",
]

FLOAT32 = np.dtype(np.float32)
ARRAYS = (np.ndarray, Planned)  # what kernels take, and no other kind of array


def fits(*arrays: Any) -> bool:
    """Whether all are NumPy arrays of float32 with something in them; others are left to `ops`."""
    for x in arrays:
        if type(x) not in ARRAYS or (x.dtype is not FLOAT32 and x.dtype != FLOAT32) or not x.size:
            return False
    return True


def formula(function: Callable[..., Any], *args: Any) -> Any:
    """What the formula in `ops` makes of arrays that the kernels do not take; what it refuses, with their shapes."""
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        why = (str(error).splitlines() or [""])[0]
        given = [one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,))]
        shapes = ", ".join(str(tuple(one.shape)) for one in given if hasattr(one, "shape"))
        raise kind(f"{function.__name__}: shapes {shapes} do not go together ({why})") from None


def upstream(dy: Any, shape: tuple[int, ...], as_it_lies: bool = False) -> np.ndarray:
    """The gradient of an output of that shape, as float32, contiguous unless it may stay; another shape is refused."""
    if type(dy) not in ARRAYS or dy.shape != shape:
        raise ValueError(
            f"an upstream gradient of shape {np.shape(dy)} for an output of shape {shape}: they must agree"
        )
    if dy.dtype is not FLOAT32 and dy.dtype != FLOAT32:
        if dy.dtype.kind not in "fiub":
            raise TypeError(f"an upstream gradient of dtype {dy.dtype}: real numbers are needed")
        dy = dy.astype(FLOAT32, copy=False)
    return dy if as_it_lies else contiguous(dy)


def contiguous(x: np.ndarray) -> np.ndarray:
    """`x`, copied only where its numbers do not lie in order."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        return x
    return copied(x) if type(x) is Planned else np.array(x, order="C")


def as_rows(x: np.ndarray) -> np.ndarray:
    """(..., C) -> (N, C), float32 with contiguous rows."""
    if x.dtype is not FLOAT32 and x.dtype != FLOAT32:
        x = x.astype(FLOAT32, copy=False)
    return contiguous(x).reshape(-1, x.shape[-1])


@inner
def round_up(n: int, grain: int) -> int:
    """n, or the next multiple of `grain`."""
    return (n + grain - 1) // grain * grain


@inner
def share(n: int, grain: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's part of n things, in multiples of `grain`. The same part for the same n, from op to op."""
    grains = (n + grain - 1) // grain
    return min(grains * thread // threads * grain, n), min(grains * (thread + 1) // threads * grain, n)


@kernel("f4[:,:,:,:], f4[:,:,:,:]", "a b c d, a b c d")
def _copy(x: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
    _, b, c, d = x.shape
    first, last = share(x.shape[0] * b * c, 16, thread, threads)
    for i in range(first, last):
        row, out = x[i // (b * c), i // c % b, i % c], y[i // (b * c), i // c % b, i % c]
        for j in range(d):
            out[j] = row[j]


@kernel("f4[::1], f4", "n")
def _fill(x: np.ndarray, value: float, thread: int, threads: int) -> None:
    a, e = share(x.size, 1024, thread, threads)
    x[a:e] = value


def copied(x: np.ndarray) -> np.ndarray:
    """The same numbers of up to four axes in C order."""
    y = empty(x.shape)
    copy_into(x, y)
    return y


def copy_into(x: np.ndarray, y: np.ndarray) -> None:
    """Copies the numbers of up to four axes."""
    _copy(_four(x), _four(y))


def _four(x: np.ndarray) -> np.ndarray:
    """With axes of size 1 in front."""
    more = 4 - x.ndim
    shape, strides = (1,) * more + x.shape, (0,) * more + x.strides
    return np.lib.stride_tricks.as_strided(x.view(np.ndarray), shape, strides)


def filled(x: np.ndarray, value: float) -> None:
    """Sets all numbers of a contiguous array."""
    _fill(x.reshape(-1), value)


KERNELS = (_copy, _fill)
