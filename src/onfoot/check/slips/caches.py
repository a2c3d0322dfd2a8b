"""Slips with what the forward pass saved: a norm's backward pass gets the other norm's statistics, input or weight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Case, Layer, Mistake, Piece, Pieces
from onfoot.check.recording import Recordings
from onfoot.check.slips.made import named

SAVED = {
    "mean and 1/σ": ("mean", "rstd"),
    "ā and 1/σ": ("normed", "rstd"),
    "ā, 1/σ and the weight, all that is saved,": ("normed", "rstd", "dnormed"),
    "1/σ": ("rstd",),
    "ā": ("normed",),
}
FIX = "what is saved last is taken first: the backward pass of ln_2 gets what ln_2 saved, then ln_1 its own"


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if {"norm_dx", "skip_mlp"} <= layer.pieces.names():
        recordings = Recordings(layer, options)
        for what, pieces in SAVED.items():
            for of, other, norms in (
                ("each norm's backward pass", "the other norm", (2, 1)),
                ("the backward pass of ln_2", "ln_1", (2,)),
                ("the backward pass of ln_1", "ln_2", (1,)),
            ):
                says = f"{of} uses {what} of {other}"
                yield named(layer, says, FIX, _exchanged(recordings, pieces, norms), *pieces)


def _exchanged(
    recordings: Recordings, pieces: tuple[str, ...], norms: tuple[int, ...]
) -> Callable[[Pieces, Case], dict[str, Piece]]:
    """The pieces with the other norm's results or weight; the last call of each is of ln_1, the one before of ln_2."""

    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        recorded, found = recordings.of(case).calls, {}
        for name in pieces:
            calls = recorded[name]
            of_norm = {1: calls[-1], 2: calls[-2]}  # (arguments, result) of each norm in the backward pass
            others = {len(calls) - norm: of_norm[3 - norm] for norm in norms}
            found[name] = _with_others(getattr(p, name), others, len(calls))
        return found

    return apply


def _with_others(right: Piece, others: Mapping[int, Any], n: int) -> Piece:
    """The piece with what it has in other calls, in some of its n calls: the weight of g, the results of the rest."""
    count = itertools.count()

    def piece(*a: Any) -> Any:
        call = next(count) % n
        if call not in others:
            return right(*a)
        arguments, result = others[call]
        return right(a[0], arguments[1]) if len(arguments) > 1 and np.ndim(arguments[1]) == 1 else result

    return piece
