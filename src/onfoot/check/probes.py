"""Generic probes: mistakes that are generated from a layer's own steps, without knowledge of the layer.

Every piece, every argument of a piece and every input of the layer is changed in the ways in which anything can be
wrong: missing, with the wrong sign, counted twice, transposed, shifted, another array in its place, only a part of it.
Each probe is a `Mistake` that can be run, so it is found as a catalogued one is: if its numbers are those returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onfoot.check.factors import candidates
from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces, transposed
from onfoot.check.routes import WORDS
from onfoot.check.words import argument_words, formula, parameters_of, piece_words, sentence

MANY = 40  # calls of pieces; a layer with more gets only the most frequent changes
OVER_TOKENS = ("dweight", "dbias", "norm_dweight", "norm_dbias")  # pieces that sum over tokens: there, parts as well
AXES = {
    1: ("feature",),
    2: ("row", "column"),
    3: ("sequence", "token", "feature"),
    4: ("sequence", "head", "token", "feature"),
    5: ("sequence", "key head", "query head", "token", "feature"),  # grouped queries
}

Values = Mapping[str, Array]


@dataclass(frozen=True)
class Edit:
    """A way in which an array can be wrong: “{} has the wrong sign”."""

    cost: float
    says: str  # with {} for the array
    apply: Callable[..., Any]  # (array, case) -> the wrong array


# what can be wrong with an array


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def edits(x: Any, case: Case, frequent: bool = False) -> Iterator[Edit]:
    """The ways in which x can be wrong, the most frequent first."""
    if isinstance(x, np.ndarray) and x.dtype.kind == "i" and x.ndim:
        yield from _of_integers(x)
    if not _is_array(x) and (isinstance(x, bool) or not isinstance(x, (int, float, np.number))):
        return
    yield Edit(1.2, "{0} is missing (taken as 0)", lambda a, c: 0 * a)
    yield Edit(1.2, "{} is left out (taken as 1)", lambda a, c: 0 * a + 1.0)
    yield Edit(1.2, "{} has the wrong sign", lambda a, c: -a)
    yield Edit(1.22, "{} is counted twice (2 times too large)", lambda a, c: 2.0 * a)
    yield Edit(1.22, "{} is halved (2 times too small)", lambda a, c: 0.5 * a)
    if np.ndim(x) >= 2:
        yield Edit(1.22, "{} is transposed", lambda a, c: transposed(a))
    yield Edit(1.24, "{} is squared", lambda a, c: a * a)
    yield Edit(1.25, "{} is cubed", lambda a, c: a * a * a)
    yield Edit(1.24, "the square root of {} is used", lambda a, c: np.sqrt(a))
    yield Edit(1.24, "{} is inverted (1 divided by it)", lambda a, c: 1.0 / a)
    yield Edit(1.24, "1 − {0} in place of {0}", lambda a, c: 1.0 - a)
    yield Edit(1.24, "1 + {0} in place of {0}", lambda a, c: 1.0 + a)
    if frequent:
        return
    yield Edit(1.26, "the absolute value of {} is used", lambda a, c: np.abs(a))
    yield Edit(1.26, "negative entries of {} are set to 0", lambda a, c: np.maximum(a, 0))
    yield from _sizes(case)
    if _is_array(x):
        yield from along_axes(x)


def _of_integers(x: Array) -> Iterator[Edit]:
    """Ids, targets or positions that are shifted or counted from another number."""
    yield Edit(1.2, "{} are shifted by one token (the token before)", _shift(-1, 1, cyclic=True))
    yield Edit(1.2, "{} are shifted by one token (the token after)", _shift(-1, -1, cyclic=True))
    yield Edit(1.22, "{} are counted from 1 (1 is added)", lambda a, c: a + 1)
    yield Edit(1.22, "1 is subtracted from {}", lambda a, c: a - 1)
    yield Edit(1.22, "{} are sorted, and what belongs to them is not", lambda a, c: np.sort(a, None).reshape(a.shape))
    yield Edit(1.24, "{} are in reverse order", lambda a, c: np.flip(a, -1))
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


def _swapped_rows(a: Array) -> Array:
    """The rows in the order of another reshape: the first two axes are exchanged before they are joined."""
    return np.swapaxes(a, 0, 1).reshape(a.shape)


# what a backward pass computes on the way


@dataclass
class Recording:
    """The values of a correct pass: by the words for them, and the arguments and results of every piece."""

    values: dict[str, Array]
    calls: dict[str, list[tuple[tuple[Any, ...], Any]]]
    words: dict[int, str]  # id of a value -> the words for it; `calls` keeps the values alive
    origins: dict[int, tuple[str, int]]  # id of a value -> the piece that gives it, and in which call


def record(layer: Layer, case: Case, options: Mapping[str, Any]) -> Recording:
    """Runs the correct pass and keeps what it computes."""
    inputs = _named_inputs(layer, case)
    found = Recording(inputs, {}, {id(x): name for name, x in inputs.items()}, {})

    def recorded(name: str, piece: Piece) -> Piece:
        def run(*arguments: Any) -> Any:
            result = piece(*arguments)
            found.calls.setdefault(name, []).append((arguments, result))
            words = piece_words(name, layer.name)
            found.words.setdefault(id(result), words)
            found.origins.setdefault(id(result), (name, len(found.calls[name]) - 1))
            if _is_array(result):
                found.values.setdefault(words, result)
            return result

        return run

    own = vars(layer.pieces).items()
    pieces = Pieces(**{name: piece if name == "route" else recorded(name, piece) for name, piece in own})
    layer.run(pieces, case, options)
    _derive(found)
    return found


def _derive(found: Recording) -> None:
    """Adds arrays that the steps do not need, but that people compute: attention's output."""
    if {"dv", "drho", "weights"} <= set(found.calls):
        (rho, _), _ = found.calls["dv"][0]
        (_, v), _ = found.calls["drho"][0]
        found.values.setdefault("the output", rho @ v)
        if "dropped" in found.calls:
            found.values.setdefault("the output without dropout", found.calls["weights"][0][1] @ v)


def _named_inputs(layer: Layer, case: Case) -> dict[str, Array]:
    pairs = zip(layer.arguments, case.inputs, strict=False)
    return {name: x for name, x in pairs if _is_array(x)}


class Recordings:
    """The recordings of the cases, each made once."""

    def __init__(self, layer: Layer, options: Mapping[str, Any]) -> None:
        self.layer, self.options = layer, options
        self.found: dict[int, tuple[Case, Recording]] = {}

    def of(self, case: Case) -> Recording:
        if id(case) not in self.found:
            self.found[id(case)] = case, record(self.layer, case, self.options)
        return self.found[id(case)][1]


# the probes


def probes(recordings: Recordings, case: Case, combined: bool = False) -> Iterator[Mistake]:
    """Every generic probe of a layer; `case` shows which arrays there are.

    Those that combine an argument with any other array are many, and come only if `combined`, alone.
    """
    layer, found = recordings.layer, recordings.of(case)
    few = sum(len(calls) for calls in found.calls.values()) > MANY
    if combined:
        for name in () if few else found.calls:
            yield from combined_arguments(recordings, case, name)
        return
    yield from _of_inputs(layer, case, few)
    for name, calls in found.calls.items():
        places: list[int | None] = [None] if len(calls) == 1 else [None, *range(len(calls))]
        for place in places:
            yield from of_piece(recordings, case, name, place, few or place is not None)


def _mistake(layer: Layer, edit: Edit | tuple[float, str], fix: str, apply: Callable[..., Any], piece: str) -> Mistake:
    cost, name = edit if isinstance(edit, tuple) else (edit.cost, edit.says)
    return Mistake(name, layer.name, "", "", fix, apply, cost=cost, per_case=True, replaces=frozenset([piece]))


def _of_inputs(layer: Layer, case: Case, few: bool) -> Iterator[Mistake]:
    """An input that is ignored, changed, used in part or exchanged with another."""
    upstream = len(case.inputs) - 1
    for i, (name, x) in enumerate(zip(layer.arguments, case.inputs, strict=False)):
        fix = f"use {name} as it is given"
        if i == upstream and layer.arguments[i] == "dout":
            fix = f"multiply by {name}, the upstream gradient, once and in full"
            yield _given(layer, (1.15, "the upstream gradient dout is ignored (taken as 1)"), fix, i, _ones)
        for edit in edits(x, case):
            if edit.says not in ("{0} is missing (taken as 0)",) or i != upstream:
                named = Edit(edit.cost - 0.02, sentence(edit.says, name), edit.apply)
                yield _given(layer, named, fix, i, edit.apply)
        for j, (other, y) in enumerate(zip(layer.arguments, case.inputs, strict=False)):
            if i != j and _is_array(x) and _is_array(y) and x.shape == y.shape:
                yield _exchanged(layer, i, j, f"{other} is used in place of {name}", fix)
                if i < j and {f"d{name}", f"d{other}"} <= set(layer.gradients):
                    yield _roles(layer, i, j)
    biases = [i for i, name in enumerate(layer.arguments) if name.startswith("b_") or name.endswith("bias")]
    if len(biases) > 1:

        def without(case: Case, options: Any) -> Any:
            return tuple(0 * x if i in biases else x for i, x in enumerate(case.inputs)), options

        yield _mistake(
            layer, (1.2, "the biases are left out"), "add every bias", lambda p, case: {"given": without}, "given"
        )


def _ones(a: Any, case: Case) -> Any:
    return 0 * a + 1.0


def _given(layer: Layer, edit: Any, fix: str, i: int, change: Callable[[Array, Case], Any]) -> Mistake:
    def given(case: Case, options: Any) -> Any:
        inputs = list(case.inputs)
        inputs[i] = change(inputs[i], case)
        return tuple(inputs), options

    return _mistake(layer, edit, fix, lambda p, case: {"given": given}, "given")


def _exchanged(layer: Layer, i: int, j: int, says: str, fix: str) -> Mistake:
    def given(case: Case, options: Any) -> Any:
        inputs = list(case.inputs)
        inputs[i] = inputs[j]
        return tuple(inputs), options

    return _mistake(layer, (1.2, says), fix, lambda p, case: {"given": given}, "given")


def _roles(layer: Layer, i: int, j: int) -> Mistake:
    """Two inputs, and with them their gradients, have each other's roles."""
    names = layer.arguments[i], layer.arguments[j]
    g, h = (layer.gradients.index(f"d{name}") for name in names)
    if layer.chosen:
        g, h = layer.chosen[g], layer.chosen[h]

    def swapped(values: Any, a: int, b: int) -> list[Any]:
        found = list(values)
        found[a], found[b] = found[b], found[a]
        return found

    def route(p: Pieces, *inputs: Any, **options: Any) -> tuple[Array, ...]:
        return tuple(swapped(layer.steps(p, *swapped(inputs, i, j), **options), g, h))

    says = f"the roles of {names[0]} and {names[1]} are exchanged"
    return _mistake(layer, (1.19, says), f"exchange {names[0]} and {names[1]}", lambda p, c: {"route": route}, "route")


def of_piece(recordings: Recordings, case: Case, name: str, place: int | None, few: bool) -> Iterator[Mistake]:
    """A piece whose result or one of whose arguments is wrong; `place` selects one of several calls."""
    layer, found = recordings.layer, recordings.of(case)
    calls = found.calls[name]
    arguments, result = calls[place or 0]
    what, where = (
        piece_words(name, layer.name),
        "" if place is None else f" ({place_words(layer, name, place, len(calls))})",
    )
    fix = formula(name, layer.name) or f"check {what}"

    probe = _maker(layer, name, place, len(calls), where, fix)
    if not few:
        yield from _reductions(probe, what, arguments, result)
    if place is None and _is_array(result) and result.ndim >= 3 and result.shape[-1] == 1:
        yield from _row_sums(probe, recordings, found, what, result.shape)
    for edit in edits(result, case, few):
        yield probe(edit.cost, sentence(edit.says, what), _result(edit))
    words_of = _words_of(layer, found, name, arguments)
    for i, x in enumerate(arguments):
        if name == "mask" and not _is_array(x):
            continue  # sizes
        argument = words_of[i]
        if _same_kind(x, result) and argument != what:
            yield probe(1.21, f"{argument} in place of {what}", _passed_through(i))
        for edit in edits(x, case, few and (place is not None or name not in OVER_TOKENS)):
            yield probe(edit.cost + 0.01, f"{sentence(edit.says, argument)} in {what}", _argument(edit, i))
        for j, y in enumerate(arguments):
            if i != j and _same_kind(x, y):
                other = words_of[j]
                yield probe(1.23, f"{other} in place of {argument} in {what}", _replaced(i, j))
        for words, value in found.values.items():
            if not _is_array(x) or words in (argument, what):
                continue
            if value.shape == x.shape:
                says = f"{words} in place of {argument} in {what}"
                yield probe(1.25, says, _from_recording(recordings, i, words))
            elif value.ndim == x.ndim and value.shape[:-1] == x.shape[:-1] and value.shape[-1] != 1:
                says = f"the first columns of {words} in place of {argument} in {what}"
                yield probe(1.26, says, _cut_from_recording(recordings, i, words))
        yield from _siblings(probe, recordings, found, x, i, f"{argument} in {what}")
    if not few:
        yield from _operations(probe, what, words_of, arguments, result)
    for words, value in found.values.items():
        if _is_array(result) and value.shape == result.shape and words != what:
            yield probe(1.25, f"{words} in place of {what}", _from_recording(recordings, None, words))
            yield probe(1.31, f"{what} has {words} added to it", _result_plus(recordings, words))


def _maker(
    layer: Layer, name: str, place: int | None, n: int, where: str, fix: str
) -> Callable[[float, str, Callable[[Piece, Case], Piece]], Mistake]:
    """Makes probes of a piece: `changed` maps the piece to the wrong one."""

    def probe(cost: float, says: str, changed: Callable[[Piece, Case], Piece]) -> Mistake:
        def apply(p: Pieces, case: Case) -> dict[str, Piece]:
            right = getattr(p, name)
            return {name: at_place(right, changed(right, case), place, n)}

        return _mistake(layer, (cost + (0 if place is None else 0.03), says + where), fix, apply, name)

    return probe


def _words_of(layer: Layer, found: Recording, name: str, arguments: tuple[Any, ...]) -> list[str]:
    """What the arguments of a piece are called."""
    names = parameters_of(getattr(layer.pieces, name), len(arguments))
    words_of = [argument_words(name, one, layer.name) for one in names]
    if (layer.name, name) in WORDS:  # a step of another route: its arguments are called what they are
        return [found.words.get(id(x), words) for x, words in zip(arguments, words_of, strict=True)]
    return words_of


def combined_arguments(recordings: Recordings, case: Case, name: str) -> Iterator[Mistake]:
    """An argument of a piece is multiplied by another array, divided by it, increased or reduced by it."""
    layer, found = recordings.layer, recordings.of(case)
    calls = found.calls[name]
    arguments, what = calls[0][0], piece_words(name, layer.name)
    probe = _maker(layer, name, None, len(calls), "", formula(name, layer.name) or f"check {what}")
    for i, (x, argument) in enumerate(zip(arguments, _words_of(layer, found, name, arguments), strict=True)):
        for words, value in found.values.items():
            if _is_array(x) and words not in (argument, what) and _fits(x, value):
                for verb, function in COMBINED:
                    says = f"{argument} is {verb.format(words)} in {what}"
                    yield probe(1.33, says, _combined(recordings, i, words, function))


def _result_plus(recordings: Recordings, words: str) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: f(*a) + recordings.of(case).values[words]


def _siblings(
    probe: Callable[..., Mistake], recordings: Recordings, found: Recording, x: Any, i: int, argument: str
) -> Iterator[Mistake]:
    """Argument i is the result of another call of the piece that gives it: the other norm's, the other projection's."""
    piece, place = found.origins.get(id(x), ("", 0))
    calls = found.calls.get(piece, [])
    for other, (_, value) in enumerate(calls):
        if other != place and _same_kind(x, value):
            which = (place_words(recordings.layer, piece, k, len(calls)) for k in (other, place))
            says = f"{piece_words(piece, recordings.layer.name)} of another place in {argument}: {{}}, not {{}}"
            yield probe(1.24, says.format(*which), _from_call(recordings, i, piece, other))


def _from_call(recordings: Recordings, i: int, piece: str, call: int) -> Callable[[Piece, Case], Piece]:
    def changed(f: Piece, case: Case) -> Piece:
        value = recordings.of(case).calls[piece][call][1]
        return lambda *a: f(*a[:i], value, *a[i + 1 :])

    return changed


def _cut_from_recording(recordings: Recordings, i: int, words: str) -> Callable[[Piece, Case], Piece]:
    def changed(f: Piece, case: Case) -> Piece:
        value = recordings.of(case).values[words]
        return lambda *a: f(*a[:i], value[..., : a[i].shape[-1]], *a[i + 1 :])

    return changed


COMBINED: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (
    ("multiplied by {}", np.multiply),
    ("divided by {}", np.divide),
    ("increased by {}", np.add),
    ("reduced by {}", np.subtract),
)


def _fits(x: Array, value: Array) -> bool:
    """Whether value can be combined with x without changing its shape."""
    try:
        return bool(np.broadcast_shapes(x.shape, value.shape) == x.shape)
    except ValueError:
        return False


def _combined(
    recordings: Recordings, i: int, words: str, function: Callable[[Array, Array], Array]
) -> Callable[[Piece, Case], Piece]:
    def changed(f: Piece, case: Case) -> Piece:
        value = recordings.of(case).values[words]
        return lambda *a: f(*a[:i], function(a[i], value), *a[i + 1 :])

    return changed


def _reductions(probe: Callable[..., Mistake], what: str, arguments: tuple[Any, ...], result: Any) -> Iterator[Mistake]:
    """A sum or mean over the last axis that is taken over other axes."""
    arrays = [x for x in arguments if _is_array(x) and x.ndim >= 3]
    if not arrays or not _is_array(result) or result.shape != (*arrays[0].shape[:-1], 1) or arrays[0].shape[-1] == 1:
        return
    names = AXES[arrays[0].ndim]
    for axis in range(arrays[0].ndim - 1):
        says = f"{what} is taken over {names[axis]}s in place of {names[-1]}s"
        yield probe(1.21, says, _over_axis(axis, False))
        yield probe(1.27, f"{says}, and not divided by their number", _over_axis(axis, True))
    yield probe(1.22, f"{what} is not summed: each {names[-1]} has its own", _unsummed)
    yield probe(1.22, f"{what} is taken over all {names[0]}s and {names[-2]}s", _over_rows)
    yield probe(1.22, f"{what} is taken over all entries", _over_all)


def _row_sums(
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


def _operations(
    probe: Callable[..., Mistake], what: str, names: list[str], arguments: tuple[Any, ...], result: Any
) -> Iterator[Mistake]:
    """A sum where a product belongs, or the reverse, for pieces of two arrays."""
    for i, j in itertools.permutations(range(len(arguments)), 2):
        x, y = arguments[i], arguments[j]
        if not (_is_array(result) and _is_array(x) and _is_array(y) and x.shape == result.shape and _fits(x, y)):
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


def _same_kind(x: Any, y: Any) -> bool:
    if _is_array(x) and _is_array(y):
        return x.shape == y.shape
    return isinstance(x, float) and isinstance(y, float)


def at_place(right: Piece, changed: Piece, place: int | None, n: int) -> Piece:
    """The changed piece in one of its n calls per pass, or in all of them."""
    if place is None:
        return changed
    count = itertools.count()
    return lambda *a: (changed if next(count) % n == place else right)(*a)


def _result(edit: Edit) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: edit.apply(f(*a), case)


def _argument(edit: Edit, i: int) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: f(*a[:i], edit.apply(a[i], case), *a[i + 1 :])


def _passed_through(i: int) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: a[i]


def _replaced(i: int, j: int) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: f(*a[:i], a[j], *a[i + 1 :])


def _from_recording(recordings: Recordings, i: int | None, words: str) -> Callable[[Piece, Case], Piece]:
    """Another array of the pass in place of argument i, or of the result."""

    def changed(f: Piece, case: Case) -> Piece:
        value = recordings.of(case).values[words]
        if i is None:
            return lambda *a: value.copy()
        return lambda *a: f(*a[:i], value, *a[i + 1 :])

    return changed


QKV = ("queries", "keys", "values")
LINEARS = ("the second MLP layer", "the first MLP layer", "the output projection", "the q, k, v projection")
NORMS = ("ln_1, forward pass", "ln_2, forward pass", "ln_2", "ln_1")


def place_words(layer: Layer, piece: str, place: int, n: int) -> str:
    """Which of the n calls of a piece."""
    if len(layer.places.get(piece, ())) == n:
        return layer.places[piece][place]
    if n == 3 and layer.name != "block":
        return f"of the {QKV[place]}"
    if layer.name == "block" and n == 4:
        return LINEARS[place] if piece in ("through", "dweight", "dbias") else NORMS[place]
    if layer.name == "block" and n == 2:
        return (
            ("forward pass", "backward pass")[place]
            if piece in ("scores", "weights", "mask")
            else ("ln_2" if place == 0 else "ln_1")
        )
    return f"call {place + 1} of {n}"
