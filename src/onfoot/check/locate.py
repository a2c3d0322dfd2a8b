"""Describes which entries of a gradient are wrong, and along which axes."""

from __future__ import annotations

import numpy as np

from onfoot.check.layer import Array


def pattern(wrong: Array) -> str:
    """Describes the wrong entries: all of them, or their indices along each axis."""
    count, total = int(wrong.sum()), wrong.size
    if count == total:
        return "every entry is wrong" if total > 1 else "its only entry is wrong"
    text = f"{count} of {total} entries {'is' if count == 1 else 'are'} wrong"
    if count == 1:
        index = tuple(int(i[0]) for i in np.nonzero(wrong))
        return f"{text}: {list(index)}"
    for axis in range(wrong.ndim):
        others = tuple(a for a in range(wrong.ndim) if a != axis)
        hit = np.nonzero(wrong.any(axis=others) if others else wrong)[0]
        if len(hit) < wrong.shape[axis]:
            text += f"; along axis {axis}: {_indices(hit, wrong.shape[axis])}"
    if wrong.ndim >= 2 and wrong.shape[-1] == wrong.shape[-2]:
        text += _triangle(wrong)
    return text


def _indices(hit: Array, size: int) -> str:
    if len(hit) == 1:
        return "the last index" if hit[0] == size - 1 and size > 1 else f"index {hit[0]}"
    if len(hit) == size - 1:
        (correct,) = set(range(size)) - set(hit.tolist())
        return f"all but index {correct}"
    if len(hit) > 2 and np.array_equal(hit, np.arange(hit[0], hit[-1] + 1)):
        return f"indices {hit[0]} to {hit[-1]}"
    return "indices " + ", ".join(str(i) for i in hit[:6]) + (", …" if len(hit) > 6 else "")


def _triangle(wrong: Array) -> str:
    above = np.triu(np.ones(wrong.shape[-2:]), 1) > 0
    if not wrong[..., ~above].any():
        return "; all above the diagonal"
    if not wrong[..., ~above.T].any():
        return "; all below the diagonal"
    return "; only the diagonal" if not wrong[..., above | above.T].any() else ""
