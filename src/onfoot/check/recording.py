"""Records what a correct backward pass computes on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onfoot.check.layer import Array, Case, Layer, Piece, Pieces, is_float_array
from onfoot.check.places import place_words
from onfoot.check.words import piece_words


@dataclass
class Recording:
    """The values of a correct pass: by the words for them, and the arguments and results of every piece."""

    values: dict[str, Array]
    calls: dict[str, list[tuple[tuple[Any, ...], Any]]]
    words: dict[int, str]  # id of a value -> the words for it; `calls` keeps the values alive
    origins: dict[int, tuple[str, int]]  # id of a value -> the piece that gives it, and in which call
    later: set[str]  # the words for values of second and further calls of a piece


def record(layer: Layer, case: Case, options: Mapping[str, Any]) -> Recording:
    """Runs the correct pass and keeps what it computes."""
    inputs = _named_inputs(layer, case)
    found = Recording(inputs, {}, {id(x): name for name, x in inputs.items()}, {}, set())

    def recorded(name: str, piece: Piece) -> Piece:
        def run(*arguments: Any) -> Any:
            result = piece(*arguments)
            found.calls.setdefault(name, []).append((arguments, result))
            words = piece_words(name, layer.name)
            found.words.setdefault(id(result), words)
            found.origins.setdefault(id(result), (name, len(found.calls[name]) - 1))
            if is_float_array(result):
                found.values.setdefault(words, result)
            return result

        return run

    own = vars(layer.pieces).items()
    pieces = Pieces(**{name: piece if name == "route" else recorded(name, piece) for name, piece in own})
    layer.run(pieces, case, options)
    _derive(found)
    for name, calls in found.calls.items():
        for k, (_, result) in enumerate(calls):
            if k and is_float_array(result):
                words = f"{piece_words(name, layer.name)} ({place_words(layer, name, k, len(calls))})"
                found.values[words] = result
                found.later.add(words)
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
    return {name: x for name, x in pairs if is_float_array(x)}


class Recordings:
    """The recordings of the cases, each made once."""

    def __init__(self, layer: Layer, options: Mapping[str, Any]) -> None:
        self.layer, self.options = layer, options
        self.found: dict[int, tuple[Case, Recording]] = {}

    def of(self, case: Case) -> Recording:
        if id(case) not in self.found:
            self.found[id(case)] = case, record(self.layer, case, self.options)
        return self.found[id(case)][1]
