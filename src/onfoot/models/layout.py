"""What the families share: token positions, targets, and splitting features into heads."""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array


class Layout(NamedTuple):
    """The tokens' positions, and the first token that each may attend to (None: the first of the sequence)."""

    positions: Array  # (T,) or (B, T)
    start: Array | None = None  # (B, T)
    limit: int | None = None  # all positions are below it


class Targets(NamedTuple):
    """The targets. If many tokens have none, `rows` are the tokens that have one, and only they are computed."""

    ids: Array  # (B, T)
    rows: Array | None = None  # (M,), indices of the tokens with a target, among all B T
    chosen: Array | None = None  # (M,), their targets


def split_heads(x: Array, n_head: int) -> Array:
    """(B, T, H D) -> (B, H, T, D). The transpose matters: a reshape alone would mix tokens and features."""
    b, t, width = x.shape
    return x.reshape(b, t, n_head, width // n_head).swapaxes(1, 2)


def merge_heads(x: Array) -> Array:
    """(B, H, T, D) -> (B, T, H D)."""
    b, h, t, d = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * d)
