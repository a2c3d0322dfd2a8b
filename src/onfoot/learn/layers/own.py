"""A known mistake of an exercise's own layer."""

from __future__ import annotations

from onfoot.check.layer import Mistake, Piece


def mistake(layer: str, equation: str, name: str, explains: str, fix: str, **pieces: Piece) -> Mistake:
    """A mistake that replaces these pieces."""
    return Mistake(name, layer, explains, equation, fix, lambda p: dict(pieces), replaces=frozenset(pieces))
