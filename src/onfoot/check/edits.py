"""The ways in which an array can be wrong, without knowledge of what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.check.factors import candidates
from onfoot.check.layer import Array, Case, is_float_array, transposed

AXES = {
    1: ("feature",),
    2: ("row", "column"),
    3: ("sequence", "token", "feature"),
    4: ("sequence", "head", "token", "feature"),
    5: ("sequence", "key head", "query head", "token", "feature"),  # grouped queries
}


@dataclass(frozen=True)
class Edit:
    """A way in which an array can be wrong: “{} has the wrong sign”."""

    cost: float
    says: str  # with {} for the array
    apply: Callable[..., Any]  # (array, case) -> the wrong array


def proportional(x: Array, y: Array) -> bool:
    """Whether one is the other, multiplied by a number other than 0 and 1."""
    product, squares = float(np.vdot(x, y)), float(np.vdot(x, x)) * float(np.vdot(y, y))
    return product * product >= (1 - 1e-12) * squares > 0 and not np.allclose(x, y, rtol=1e-9)


def edits(x: Any, case: Case, frequent: bool = False) -> Iterator[Edit]:
    """The ways in which x can be wrong, the most frequent first."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "i" and x.ndim:
        yield from _of_integers(x)
    if not is_float_array(x) and (isinstance(x, bool) or not isinstance(x, (int, float, np.number))):
        return
    yield Edit(1.2, "{0} is missing (taken as 0)", lambda a, c: 0 * a)
    yield Edit(1.2, "{} is left out (taken as 1)", lambda a, c: 0 * a + 1.0)
    yield Edit(1.2, "{} has the wrong sign", lambda a, c: -a)
    yield Edit(1.22, "{} is counted twice (2 times too large)", lambda a, c: 2.0 * a)
    yield Edit(1.22, "{} is halved (2 times too small)", lambda a, c: 0.5 * a)
    if np.ndim(x) >= 2:
        yield Edit(1.22, "{0} and its transpose are exchanged", lambda a, c: transposed(a))
        yield Edit(1.225, "{} is reshaped where it must be transposed", lambda a, c: _reshaped(a))
    if np.ndim(x) == 3:
        says = "{} is reshaped to (features, tokens) where it must be transposed"
        yield Edit(1.226, says, lambda a, c: a.reshape(a.shape[-1], -1).T.reshape(a.shape))
    yield Edit(1.24, "{} is squared", lambda a, c: a * a)
    yield Edit(1.25, "{} is cubed", lambda a, c: a * a * a)
    yield Edit(1.24, "the square root of {} is used", lambda a, c: np.sqrt(a))
    yield Edit(1.24, "{} is inverted (1 divided by it)", lambda a, c: 1.0 / a)
    yield Edit(1.24, "1 − {0} in place of {0}", lambda a, c: 1.0 - a)
    yield Edit(1.24, "1 + {0} in place of {0}", lambda a, c: 1.0 + a)
    if frequent:
        yield from (edit for edit in _sizes(case) if " √d_k " in edit.says)  # the scale of attention
        return
    yield Edit(1.26, "the absolute value of {} is used", lambda a, c: np.abs(a))
    yield Edit(1.26, "negative entries of {} are set to 0", lambda a, c: np.maximum(a, 0))
    yield from _sizes(case)
    if np.ndim(x) == 4 and case.sizes.get("G", 1) > 1 and x.shape[1] == case.sizes["H"]:
        yield Edit(1.28, "{} is summed over the query heads of a group", _over_groups)
    if is_float_array(x):
        yield from along_axes(x)
    # after the parts: of softmax's weights, only the first token's 1 is left of integers
    yield Edit(1.292, "{} is cut off to integers (an integer dtype)", lambda a, c: np.trunc(a))
    yield Edit(1.292, "{} is rounded down to integers (//)", lambda a, c: np.floor(a))
    yield Edit(1.294, "{} is rounded to integers", lambda a, c: np.round(a))


def _reshaped(a: Array) -> Array:
    """What a pass that transposes `a` computes with if it is reshaped to the shape of its transpose instead."""
    return transposed(a.reshape(*a.shape[:-2], a.shape[-1], a.shape[-2]))


def _of_integers(x: Array) -> Iterator[Edit]:
    """Ids, targets or positions that are shifted or counted from another number."""
    yield Edit(1.2, "{} are shifted by one token (the token before)", _shift(-1, 1, cyclic=True))
    yield Edit(1.2, "{} are shifted by one token (the token after)", _shift(-1, -1, cyclic=True))
    yield Edit(1.22, "{} are counted from 1 (1 is added)", lambda a, c: a + 1)
    yield Edit(1.22, "1 is subtracted from {}", lambda a, c: a - 1)
    yield Edit(1.22, "{} are sorted, and what belongs to them is not", lambda a, c: np.sort(a, None).reshape(a.shape))
    yield Edit(1.24, "{} are in reverse order", lambda a, c: np.flip(a, -1))
    if x.ndim == 2:
        says = "{} are taken in another order: flattened with sequences and tokens exchanged"
        yield Edit(1.24, says, lambda a, c: a.T.reshape(a.shape))
    yield Edit(1.24, "{} are in reverse order, sequences as well", lambda a, c: np.flip(a))


def _sizes(case: Case) -> Iterator[Edit]:
    for name in candidates(case.sizes):
        if not name.isdigit() and not any(sign in name for sign in "²−+"):
            yield Edit(1.24, f"{{}} is {name} times too large", lambda a, c, n=name: a * candidates(c.sizes)[n])
            yield Edit(1.24, f"{{}} is {name} times too small", lambda a, c, n=name: a / candidates(c.sizes)[n])


def along_axes(x: Array) -> Iterator[Edit]:
    for axis in range(-x.ndim, 0):
        one = AXES.get(x.ndim, ("index",) * x.ndim)[axis]
        for where, index in (("first", 0), ("last", -1)):
            yield Edit(1.28, f"only the {where} {one} of {{}} is used", _part(axis, index, keep=True))
            yield Edit(1.28, f"the {where} {one} of {{}} is left out", _part(axis, index, keep=False))
            if x.shape[axis] > 1 and x.ndim > 1:
                says = f"the {where} {one} of {{}} is used for all {one}s"
                yield Edit(1.29, says, _first_for_all(axis, index))
        for by in (1, -1):
            to = "later" if by > 0 else "earlier"
            yield Edit(1.3, f"{{}} is shifted to the {one} one {to}", _shift(axis, by, cyclic=False))
            yield Edit(1.3, f"{{}} is shifted cyclically by one {one}", _shift(axis, by, cyclic=True))
        yield Edit(1.3, f"{{}} has its {one}s in reverse order", lambda a, c, axis=axis: np.flip(a, axis))
        yield Edit(1.3, f"{{}} is averaged over its {one}s", _over(axis, np.mean))
        yield Edit(1.3, f"{{}} is summed over its {one}s", _over(axis, np.sum))
        yield Edit(1.32, f"{{}} is accumulated over its {one}s", lambda a, c, axis=axis: np.cumsum(a, axis))
    if x.ndim and x.shape[-1] % 2 == 0:
        half = "{} has its two halves exchanged"
        yield Edit(1.3, half, lambda a, c: np.roll(a, a.shape[-1] // 2, -1))
    if x.ndim >= 3:
        says = "{} is not reset: it accumulates over all rows, from one sequence into the next"
        yield Edit(1.31, says, lambda a, c: np.cumsum(a.reshape(-1, a.shape[-1]), 0).reshape(a.shape))
    if x.ndim == 3:
        for where, index in (("first", 0), ("last", -1)):
            token = f"{where} token of the {where} sequence"
            yield Edit(1.29, f"only the {token} of {{}} is used", _in_rows(_part(-2, index, keep=True)))
            yield Edit(1.29, f"the {token} of {{}} is left out", _in_rows(_part(-2, index, keep=False)))
        for by in (1, -1):
            says = "{} is shifted by one token, from one sequence into the next"
            yield Edit(1.31, says, _in_rows(_shift(-2, by, cyclic=True)))
    if x.ndim >= 3 and len({*x.shape[:2]}) == 2:
        yield Edit(1.3, "the tokens of {} are taken in another order", lambda a, c: _swapped_rows(a))


def _in_rows(change: Callable[[Array, Case], Array]) -> Callable[[Array, Case], Array]:
    """The change of the tokens of all sequences in one list."""
    return lambda a, case: change(a.reshape(-1, a.shape[-1]), case).reshape(a.shape)


def _part(axis: int, index: int, keep: bool) -> Callable[[Array, Case], Array]:
    def apply(a: Array, case: Case) -> Array:
        out = np.zeros_like(a) if keep else a.copy()
        place = [slice(None)] * a.ndim
        place[axis] = slice(index, None) if index < 0 else slice(index, index + 1)
        out[tuple(place)] = a[tuple(place)] if keep else 0
        return out

    return apply


def _first_for_all(axis: int, index: int) -> Callable[[Array, Case], Array]:
    return lambda a, case: np.broadcast_to(np.take(a, [index], axis), a.shape).copy()


def _shift(axis: int, by: int, cyclic: bool) -> Callable[[Array, Case], Array]:
    def apply(a: Array, case: Case) -> Array:
        out = np.roll(a, by, axis)
        if not cyclic:
            place = [slice(None)] * a.ndim
            place[axis] = slice(0, 1) if by > 0 else slice(-1, None)
            out[tuple(place)] = 0
        return out

    return apply


def _over(axis: int, function: Callable[..., Array]) -> Callable[[Array, Case], Array]:
    return lambda a, case: np.broadcast_to(function(a, axis=axis, keepdims=True), a.shape).copy()


def _over_groups(a: Array, case: Case) -> Array:
    """Each entry is the sum over the query heads that share a key head."""
    by_group = a.reshape(a.shape[0], int(case.sizes["H_kv"]), -1, *a.shape[2:])  # (B, Hkv, G, …)
    return np.broadcast_to(by_group.sum(axis=2, keepdims=True), by_group.shape).reshape(a.shape)


def _swapped_rows(a: Array) -> Array:
    """The rows in the order of another reshape: the first two axes are exchanged before they are joined."""
    return np.swapaxes(a, 0, 1).reshape(a.shape)


def fits(x: Array, value: Array) -> bool:
    """Whether value can be combined with x without changing its shape."""
    try:
        return bool(np.broadcast_shapes(x.shape, value.shape) == x.shape)
    except ValueError:
        return False
