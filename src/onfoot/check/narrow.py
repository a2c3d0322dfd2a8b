"""float16 and bfloat16: what they round to, and how far a correct implementation in them may be off.

In so few bits, an estimate from small perturbations is too coarse alone. So the formula is also run with the inputs of
every step rounded to the dtype, which shows what rounding, overflow and underflow do in this very case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onfoot.check.budget import distance, norm
from onfoot.check.layer import Array, Case, Layer, Pieces, is_float_array

NARROW = ("float16", "bfloat16")
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest relative error of one rounding
ALLOWED = 16  # rounding errors of the magnitude; sums that accumulate in 16 bits need about half of it
OF_FORMULA = 4  # times the error of the formula when every step rounds
TOO_FAR = 0.5  # relative error of the formula itself, beyond which a case says nothing in this dtype


def rounded(x: Array, dtype: str) -> Array:
    """The nearest numbers of that dtype, as float32 for bfloat16, which NumPy does not have."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), nearest.view(np.float32), x).astype(np.float32).reshape(np.shape(x))


def rounding(pieces: Pieces, dtype: str) -> Pieces:
    """The same pieces with the arrays they take rounded to the dtype."""

    def narrow(x: Any) -> Any:
        return rounded(x, dtype).astype(np.float64) if is_float_array(x) else x

    def wrap(piece: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: piece(*map(narrow, arguments))

    return Pieces(**{name: wrap(piece) for name, piece in vars(pieces).items()})


def narrow_budgets(
    layer: Layer,
    case: Case,
    options: Mapping[str, Any],
    dtype: str,
    right: Sequence[Array],
    magnitudes: Sequence[float],
) -> list[float] | None:
    """The allowed errors in a 16-bit dtype; None if the formula itself fails in it, so that the case says nothing."""
    found = layer.run(rounding(layer.pieces, dtype), case, options)
    if not all(np.isfinite(g).all() for g in found):
        return None
    off = [distance(g, r) for g, r in zip(found, right, strict=True)]
    explained = [ALLOWED * UNIT[dtype] * m for m in magnitudes]  # also where a gradient is 0 in theory
    if any(error > max(TOO_FAR * norm(r), e) for error, r, e in zip(off, right, explained, strict=True)):
        return None
    return [max(e, OF_FORMULA * error) for e, error in zip(explained, off, strict=True)]
