"""Slips in heads: every H-th column in place of a block of columns, another number of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Layer, Mistake, Piece, Pieces
from onfoot.check.slips.made import named

FIX = "head h has the columns h · d_k to (h + 1) · d_k: reshape the last axis to (heads, d_k), in this order"


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "split_dout" in layer.pieces.names():
        yield from _columns(layer)
        yield from _numbers(layer, int({**layer.options, **options}["n_head"]))


def _split(x: Array, n_head: int) -> Array:
    """(B, T, C) -> (B, H, T, D), with every H-th column in a head."""
    return np.moveaxis(x.reshape(*x.shape[:-1], -1, n_head), -1, 1)


def _merge(x: Array) -> Array:
    return np.moveaxis(x, 1, -1).reshape(x.shape[0], x.shape[2], -1)


def _columns(layer: Layer) -> Iterator[Mistake]:
    every: dict[str, Piece] = {"split": _split, "split_dout": _split, "merge": _merge}
    says = "a head takes every H-th column, in place of a block of d_k columns"
    for where, names in (
        ("", ("split", "split_dout", "merge")),
        (", in q, k and v and their gradients, but not in the output", ("split", "merge")),
        (", in the forward pass alone", ("split",)),
        (", in the backward pass alone", ("split_dout", "merge")),
    ):
        changed = {name: every[name] for name in names}
        yield named(layer, says + where, FIX, lambda p, case, changed=changed: changed, *names)


def _numbers(layer: Layer, n_head: int) -> Iterator[Mistake]:
    """The whole pass with another number of heads."""
    for n in (1, 2, 3, 4, 8):
        if n != n_head:
            says = f"right with {n} head{'s' if n > 1 else ''} in place of {n_head}"
            yield named(layer, says, f"use {n_head} heads; or check with --n-head {n}", _with_heads(n), "given")


def _with_heads(n: int) -> Callable[..., dict[str, Piece]]:
    def apply(p: Pieces, case: Any) -> dict[str, Piece]:
        return {"given": lambda case, options: (case.inputs, {**options, "n_head": n})}

    return apply
