"""Which of several calls of a piece is changed, and the words for it."""

from __future__ import annotations

import itertools

from onfoot.check.layer import Layer, Piece


def at_place(right: Piece, changed: Piece, place: int | None, n: int) -> Piece:
    """The changed piece in one of its n calls per pass, or in all of them."""
    if place is None:
        return changed
    count = itertools.count()
    return lambda *a: (changed if next(count) % n == place else right)(*a)


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
