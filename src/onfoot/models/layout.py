"""What the families share: token positions and targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.models.inputs import check_segments


class Layout(NamedTuple):
    """The tokens' positions, and the first token that each may attend to (None: the first of the sequence)."""

    positions: Array  # (T,) or (B, T)
    start: Array | None = None  # (B, T)
    limit: int | None = None  # all positions are below it
    window_start: Array | None = None  # (B, T), in layers with a sliding window; None: as in the others

    def map(self, f: Callable[[str, Array], Array]) -> Layout:
        """The same with f(name, array) in place of each array."""
        made = {name: x if x is None or name == "limit" else f(name, x) for name, x in self._asdict().items()}
        return Layout(**made)


def layout_of(config: Any, tokens: np.ndarray, segments: Any = None) -> Layout:
    """The layout of tokens (B, T), as NumPy arrays; with `segments`, positions are those within each example."""
    batch, limit = tokens.shape
    index = np.arange(limit)
    if segments is None:
        return in_window(config, Layout(index, None, limit), index, batch)
    if not config.causal:
        raise ValueError("segments need causal=True: without the causal mask, tokens would attend to later examples")
    positions, start = check_segments(segments, tokens)
    if limit > getattr(config, "max_position_embeddings", limit):
        limit = int(positions.max()) + 1  # dynamic RoPE depends on the longest example
    return in_window(config, Layout(positions, start, limit), index, batch)


def in_window(config: Any, layout: Layout, index: np.ndarray, batch: int) -> Layout:
    """The layout with `window_start`, if the configuration has a sliding window shorter than the layout's limit.

    A token attends to the last W tokens, itself included: from index − W + 1 on, and not before its example begins.
    """
    window = getattr(config, "sliding_window", None)
    if window is None or layout.limit is None or layout.limit <= window:
        return layout
    start = np.zeros((batch, 1), np.int64) if layout.start is None else layout.start
    return layout._replace(window_start=np.maximum(start, index - window + 1))  # eq LLAMA.6


class Targets(NamedTuple):
    """The targets. If many tokens have none, `rows` are the tokens that have one, and only they are computed."""

    ids: Array  # (B, T)
    rows: Array | None = None  # (M,), indices of the tokens with a target, among all B T
    chosen: Array | None = None  # (M,), their targets
