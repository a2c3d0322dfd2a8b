"""What the kernels share: which arrays they support, and how work is divided among threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onfoot.kernels.buffers import empty
from onfoot.kernels.jit import inner, kernel
from onfoot.recording.pool import threads
from onfoot.recording.recorded_array import RecordedArray

__all__ = [
    "ARRAYS",
    "FLOAT32",
    "as_rows",
    "contiguous",
    "copied",
    "copy_into",
    "fall_back_to_formula",
    "filled",
    "is_float32",
    "round_up",
    "thread_range",
    "threads",
    "upstream",
]

FLOAT32 = np.dtype(np.float32)
ARRAYS = (np.ndarray, RecordedArray)  # the array types that kernels support


def is_float32(*arrays: Any) -> bool:
    """Whether all are non-empty NumPy arrays of float32; for others `ops` is used."""
    for x in arrays:
        if type(x) not in ARRAYS or (x.dtype is not FLOAT32 and x.dtype != FLOAT32) or not x.size:
            return False
    return True


def fall_back_to_formula(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the formula in `ops` for arrays that the kernels do not support; its errors name the shapes."""
    try:
        return function(*args)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        why = (str(error).splitlines() or [""])[0]
        given = [one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,))]
        shapes = ", ".join(str(tuple(one.shape)) for one in given if hasattr(one, "shape"))
        raise kind(f"{function.__name__}: incompatible shapes {shapes} ({why})") from None


def upstream(dy: Any, shape: tuple[int, ...], any_layout: bool = False) -> np.ndarray:
    """The upstream gradient as float32, contiguous unless `any_layout`; an error if it has another shape."""
    if type(dy) not in ARRAYS or dy.shape != shape:
        raise ValueError(
            f"the upstream gradient has shape {np.shape(dy)}, but the output has shape {shape}; they must match"
        )
    if dy.dtype is not FLOAT32 and dy.dtype != FLOAT32:
        if dy.dtype.kind not in "fiub":
            raise TypeError(f"the upstream gradient must be real numbers, got dtype {dy.dtype}")
        dy = dy.astype(FLOAT32, copy=False)
    return dy if any_layout else contiguous(dy)


def contiguous(x: np.ndarray) -> np.ndarray:
    """`x`, copied only if it is not contiguous."""
    flags = x.flags
    if flags.c_contiguous and flags.aligned:
        return x
    return copied(x) if type(x) is RecordedArray else np.array(x, order="C")


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
def thread_range(n: int, grain: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's range (begin, end) of n items, in multiples of `grain`; the same for the same n in every op."""
    grains = (n + grain - 1) // grain
    return min(grains * thread // threads * grain, n), min(grains * (thread + 1) // threads * grain, n)


@kernel("f4[:,:,:,:], f4[:,:,:,:]", "a b c d, a b c d")
def _copy(x: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
    _, b, c, d = x.shape
    first, last = thread_range(x.shape[0] * b * c, 16, thread, threads)
    for i in range(first, last):
        row, out = x[i // (b * c), i // c % b, i % c], y[i // (b * c), i // c % b, i % c]
        for j in range(d):
            out[j] = row[j]


@kernel("f4[::1], f4", "n")
def _fill(x: np.ndarray, value: float, thread: int, threads: int) -> None:
    a, e = thread_range(x.size, 1024, thread, threads)
    x[a:e] = value


def copied(x: np.ndarray) -> np.ndarray:
    """A copy of up to four axes in C order."""
    y = empty(x.shape)
    copy_into(x, y)
    return y


def copy_into(x: np.ndarray, y: np.ndarray) -> None:
    """Copies x into y, up to four axes."""
    _copy(_four(x), _four(y))


def _four(x: np.ndarray) -> np.ndarray:
    """`x` with leading axes of size 1, four in all."""
    more = 4 - x.ndim
    shape, strides = (1,) * more + x.shape, (0,) * more + x.strides
    return np.lib.stride_tricks.as_strided(x.view(np.ndarray), shape, strides)


def filled(x: np.ndarray, value: float) -> None:
    """Fills a contiguous array with one value."""
    _fill(x.reshape(-1), value)


KERNELS = (_copy, _fill)
