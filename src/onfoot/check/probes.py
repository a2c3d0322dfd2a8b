"""Generic probes: mistakes that are generated from a layer's own steps, without knowledge of the layer.

Every piece, every argument of a piece and every input of the layer is changed in the ways in which anything can be
wrong: missing, with the wrong sign, counted twice, transposed, shifted, another array in its place, only a part of it.
Each probe is a `Mistake` that can be run, so it is found as a catalogued one is: if its numbers are those returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from onfoot.check.edits import Edit, edits, fits, proportional
from onfoot.check.layer import Array, Case, Layer, Mistake, Piece, Pieces, is_float_array
from onfoot.check.places import at_place, place_words
from onfoot.check.recording import Recording, Recordings
from onfoot.check.routes import WORDS
from onfoot.check.sum_probes import operations, reductions, row_sums
from onfoot.check.words import argument_words, formula, parameters_of, piece_words, sentence

MANY = 40  # calls of pieces; a layer with more gets only the most frequent changes
OVER_TOKENS = ("dweight", "dbias", "norm_dweight", "norm_dbias")  # pieces that sum over tokens: there, parts as well


def probes(
    recordings: Recordings, case: Case, combined: bool = False, likely: Collection[tuple[str, int | None]] = ()
) -> Iterator[Mistake]:
    """Every generic probe of a layer; `case` shows which arrays there are, and more is tried at the likely places.

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
            yield from of_piece(
                recordings, case, name, place, (few or place is not None) and (name, place) not in likely
            )


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
                size = " times too " in edit.says and name != "dout" and len(layer.gradients) > 3
                named = Edit(edit.cost + (0.025 if size else -0.02), sentence(edit.says, name), edit.apply)
                yield _given(layer, named, fix, i, edit.apply)
        for j, (other, y) in enumerate(zip(layer.arguments, case.inputs, strict=False)):
            if i != j and is_float_array(x) and is_float_array(y) and x.shape == y.shape:
                yield _exchanged(layer, i, j, f"{other} is used in place of {name}", fix)
                if i < j and {f"d{name}", f"d{other}"} <= set(layer.gradients):
                    yield _roles(layer, i, j)
    yield from _other_parameters(layer, case)
    biases = [i for i, name in enumerate(layer.arguments) if name.startswith("b_") or name.endswith("bias")]
    if len(biases) > 1:

        def without(case: Case, options: Any) -> Any:
            return tuple(0 * x if i in biases else x for i, x in enumerate(case.inputs)), options

        yield _mistake(
            layer, (1.2, "the biases are left out"), "add every bias", lambda p, case: {"given": without}, "given"
        )


def _other_parameters(layer: Layer, case: Case) -> Iterator[Mistake]:
    """The weight and the bias of another part of the layer."""
    shapes = {name: np.shape(x) for name, x in zip(layer.arguments, case.inputs, strict=False)}
    parts = [name.removesuffix("_weight") for name in shapes if name.endswith("_weight")]
    for part, other in itertools.permutations(parts, 2):
        pair = [(f"{part}_{kind}", f"{other}_{kind}") for kind in ("weight", "bias")]
        if all(b in shapes and shapes.get(a) == shapes[b] for a, b in pair):
            places = {layer.arguments.index(a): layer.arguments.index(b) for a, b in pair}

            def given(case: Case, options: Any, places: dict[int, int] = places) -> Any:
                return tuple(case.inputs[places.get(i, i)] for i in range(len(case.inputs))), options

            says = f"{part} uses the weight and the bias of {other}"
            apply = lambda p, case, given=given: {"given": given}  # noqa: E731
            yield _mistake(layer, (1.2, says), f"use {part}_weight and {part}_bias", apply, "given")


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
    alone = place is not None or len(calls) == 1  # one call, where values of one other call may be used

    probe = _maker(layer, name, place, len(calls), where, fix)
    if not few:
        yield from reductions(probe, what, arguments, result)
    if place is None and is_float_array(result) and result.ndim >= 3 and result.shape[-1] == 1:
        yield from row_sums(probe, recordings, found, what, result.shape)
    for edit in edits(result, case, few):
        yield probe(edit.cost, sentence(edit.says, what), _result(edit))
    words_of = _words_of(layer, found, name, arguments)
    for i, x in enumerate(arguments):
        if name == "mask" and not is_float_array(x):
            continue  # sizes
        argument = words_of[i]
        if _same_kind(x, result) and argument != what and not (is_float_array(x) and proportional(x, result)):
            yield probe(1.21, f"{argument} in place of {what}", _passed_through(i))
        for edit in edits(x, case, few and (place is not None or name not in OVER_TOKENS)):
            yield probe(edit.cost + 0.01, f"{sentence(edit.says, argument)} in {what}", _argument(edit, i))
        if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
            for size in case.sizes:
                yield probe(1.23, f"{size} in place of {argument} in {what}", _size_for(size, i))
        for j, y in enumerate(arguments):
            if i != j and _same_kind(x, y):
                other = words_of[j]
                yield probe(1.23, f"{other} in place of {argument} in {what}", _replaced(i, j))
        for words, value in found.values.items():
            if not is_float_array(x) or words in (argument, what) or (words in found.later and not alone):
                continue
            if value.shape == x.shape:
                if proportional(value, x):
                    continue  # a factor, which says more
                says = f"{words} in place of {argument} in {what}"
                yield probe(1.25, says, _from_recording(recordings, i, words))
            elif value.ndim == x.ndim and value.shape[:-1] == x.shape[:-1] and value.shape[-1] != 1:
                says = f"the first columns of {words} in place of {argument} in {what}"
                yield probe(1.26, says, _cut_from_recording(recordings, i, words))
        yield from _siblings(probe, recordings, found, x, i, f"{argument} in {what}")
    if not few:
        yield from operations(probe, what, words_of, arguments, result)
    for call, (_, value) in enumerate(calls):
        if place is not None and call != place and _same_kind(value, result):
            which = place_words(layer, name, call, len(calls))
            says = f"{what} is that of another place, {which}: a stale or wrong variable"
            yield probe(1.2, says, _result_of_call(recordings, name, call))
    for words, value in found.values.items():
        if words in found.later and not (alone and len(calls) == 1):
            continue
        if is_float_array(result) and value.shape == result.shape and words != what and not proportional(value, result):
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

        found = _mistake(layer, (cost + (0 if place is None else 0.03), says + where), fix, apply, name)
        return replace(found, call=place)

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
            if is_float_array(x) and words not in (argument, what) and words not in found.later and fits(x, value):
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


def _result_of_call(recordings: Recordings, piece: str, call: int) -> Callable[[Piece, Case], Piece]:
    def changed(f: Piece, case: Case) -> Piece:
        value = recordings.of(case).calls[piece][call][1]
        return lambda *a: value

    return changed


def _size_for(size: str, i: int) -> Callable[[Piece, Case], Piece]:
    return lambda f, case: lambda *a: f(*a[:i], case.sizes[size], *a[i + 1 :])


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


def _combined(
    recordings: Recordings, i: int, words: str, function: Callable[[Array, Array], Array]
) -> Callable[[Piece, Case], Piece]:
    def changed(f: Piece, case: Case) -> Piece:
        value = recordings.of(case).values[words]
        return lambda *a: f(*a[:i], function(a[i], value), *a[i + 1 :])

    return changed


def _same_kind(x: Any, y: Any) -> bool:
    if is_float_array(x) and is_float_array(y):
        return x.shape == y.shape
    return isinstance(x, float) and isinstance(y, float)


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
        return lambda *a: f(*a[:i], value[..., : a[i].shape[-1]] if value.ndim else value, *a[i + 1 :])

    return changed
