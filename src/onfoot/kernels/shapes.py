"""What the pairs share: which arrays the kernels take, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onfoot.kernels.jit import inner
from onfoot.kernels.pool import threads

__all__ = ["FLOAT32", "as_rows", "contiguous", "fits", "formula", "round_up", "share", "threads", "upstream"]

FLOAT32 = np.dtype(np.float32)


def fits(*arrays: Any) -> bool:
    """Whether all are NumPy arrays of float32 with something in them; others are left to `ops`."""
    for x in arrays:
        if type(x) is not np.ndarray or (x.dtype is not FLOAT32 and x.dtype != FLOAT32) or not x.size:
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


def upstream(dy: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of an output of that shape, as contiguous float32; of any other shape it is refused."""
    if type(dy) is not np.ndarray or dy.shape != shape:
        raise ValueError(
            f"an upstream gradient of shape {np.shape(dy)} for an output of shape {shape}: they must agree"
        )
    if dy.dtype is not FLOAT32:
        if dy.dtype.kind not in "fiub":
            raise TypeError(f"an upstream gradient of dtype {dy.dtype}: real numbers are needed")
        dy = dy.astype(FLOAT32, copy=False)
    return contiguous(dy)


def contiguous(x: np.ndarray) -> np.ndarray:
    """`x`, copied only where its numbers do not lie in order."""
    flags = x.flags
    return x if flags.c_contiguous and flags.aligned else np.array(x, order="C")


def as_rows(x: np.ndarray) -> np.ndarray:
    """(..., C) -> (N, C), float32 with contiguous rows."""
    if x.dtype is not FLOAT32:
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
