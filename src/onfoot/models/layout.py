"""What the families share: where tokens stand, and how features are cut into heads."""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array


class Layout(NamedTuple):
    """Where the tokens stand: their positions, and the first token that each may see (None: the first of all)."""

    positions: Array  # (T,) or (B, T)
    start: Array | None = None  # (B, T)
    limit: int | None = None  # all positions are below it


class Targets(NamedTuple):
    """What is to be predicted. Where many tokens have no target, those that have one are named: only they are used."""

    ids: Array  # (B, T)
    rows: Array | None = None  # (M,), the tokens that have one, among all B T
    chosen: Array | None = None  # (M,), theirs


def split_heads(x: Array, n_head: int) -> Array:
    """(B, T, H D) -> (B, H, T, D). The transpose matters: a mere reshape would mix tokens and features."""
    b, t, width = x.shape
    return x.reshape(b, t, n_head, width // n_head).swapaxes(1, 2)


def merge_heads(x: Array) -> Array:
    """(B, H, T, D) -> (B, T, H D)."""
    b, h, t, d = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * d)
