"""Probes of sums and products: over other axes, of other arrays, a sum in place of a product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from onfoot.check.edits import AXES, fits
from onfoot.check.layer import Array, Case, Mistake, Piece, is_float_array
from onfoot.check.recording import Recording, Recordings


def reductions(probe: Callable[..., Mistake], what: str, arguments: tuple[Any, ...], result: Any) -> Iterator[Mistake]:
    """A sum or mean over the last axis that is taken over other axes."""
    arrays = [x for x in arguments if is_float_array(x) and x.ndim >= 3]
    if not arrays or not is_float_array(result):
        return
    if result.shape != (*arrays[0].shape[:-1], 1) or arrays[0].shape[-1] == 1:
        return
    names = AXES[arrays[0].ndim]
    for axis in range(arrays[0].ndim - 1):
        says = f"{what} is taken over {names[axis]}s in place of {names[-1]}s"
        yield probe(1.21, says, _over_axis(axis, False))
        yield probe(1.27, f"{says}, and not divided by their number", _over_axis(axis, True))
    yield probe(1.22, f"{what} is not summed: each {names[-1]} has its own", _unsummed)
    yield probe(1.22, f"{what} is taken over all {names[0]}s and {names[-2]}s", _over_rows)
    yield probe(1.22, f"{what} is taken over all entries", _over_all)


def row_sums(
    probe: Callable[..., Mistake], recordings: Recordings, found: Recording, what: str, shape: tuple[int, ...]
) -> Iterator[Mistake]:
    """The row sum of the product of two other arrays."""
    arrays = [(words, x) for words, x in found.values.items() if x.shape[:-1] == shape[:-1] and x.shape[-1] > 1]
    for (a, x), (b, y) in itertools.combinations_with_replacement(arrays, 2):
        if x.shape == y.shape:
            yield probe(1.26, f"the row sum of {a} ∘ {b} in place of {what}", _row_sum(recordings, a, b, np.sum))
            yield probe(1.3, f"the row mean of {a} ∘ {b} in place of {what}", _row_sum(recordings, a, b, np.mean))


def _row_sum(recordings: Recordings, a: str, b: str, over: Callable[..., Array]) -> Callable[[Piece, Case], Piece]:
    def changed(f: Piece, case: Case) -> Piece:
        values = recordings.of(case).values
        return lambda *_: over(values[a] * values[b], axis=-1, keepdims=True)

    return changed


def _over_axis(axis: int, undivided: bool) -> Callable[[Piece, Case], Piece]:
    """The piece with two axes exchanged; `undivided` by the number along that axis, but by that of the last one."""

    def changed(f: Piece, case: Case) -> Piece:
        def piece(*a: Any) -> Array:
            swapped = [np.swapaxes(x, axis, -1) if isinstance(x, np.ndarray) and x.ndim >= 3 else x for x in a]
            found = np.swapaxes(f(*swapped), axis, -1)
            shape = next(x.shape for x in a if isinstance(x, np.ndarray) and x.ndim >= 3)
            return found * (shape[axis] / shape[-1]) if undivided else found

        return piece

    return changed


def _over_rows(f: Piece, case: Case) -> Piece:
    def piece(*a: Any) -> Array:
        rows = [x.reshape(-1, x.shape[-1]).T if isinstance(x, np.ndarray) and x.ndim >= 3 else x for x in a]
        return f(*rows).T[None]

    return piece


def _unsummed(f: Piece, case: Case) -> Piece:
    """The piece of single features."""
    return lambda *a: f(*(x[..., None] if isinstance(x, np.ndarray) and x.ndim >= 3 else x for x in a))[..., 0]


def _over_all(f: Piece, case: Case) -> Piece:
    return lambda *a: f(*(x.reshape(1, 1, -1) if isinstance(x, np.ndarray) and x.ndim >= 3 else x for x in a))


def operations(
    probe: Callable[..., Mistake], what: str, names: list[str], arguments: tuple[Any, ...], result: Any
) -> Iterator[Mistake]:
    """A sum where a product belongs, or the reverse, for pieces of two arrays."""
    for i, j in itertools.permutations(range(len(arguments)), 2):
        x, y = arguments[i], arguments[j]
        if not (all(map(is_float_array, (result, x, y))) and x.shape == result.shape and fits(x, y)):
            continue
        a, b = names[i], names[j]
        for sign, function in (("+", np.add), ("−", np.subtract), ("∘", np.multiply), ("/", np.divide)):
            yield probe(1.27, f"{a} {sign} {b} in place of {what}", _operation(i, j, function))
        yield probe(1.28, f"{a} + {b} in place of {a} ∘ {b} in {what}", _sum_for_product(i, j))


def _operation(i: int, j: int, function: Callable[[Array, Array], Array]) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: function(a[i], a[j])


def _sum_for_product(i: int, j: int) -> Callable[[Piece, Case], Piece]:
    """The piece of a + b and 1 in place of a and b."""

    def changed(f: Piece, case: Case) -> Piece:
        def piece(*a: Any) -> Any:
            given = list(a)
            given[i], given[j] = a[i] + a[j], 0 * a[j] + 1.0
            return f(*given)

        return piece

    return changed
