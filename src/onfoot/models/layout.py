"""What the families share: token positions and targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import Array


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
