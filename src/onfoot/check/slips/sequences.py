"""Slips in which the sequences of a batch run into each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Array, Gradients, Layer, Mistake, Pieces
from onfoot.check.slips.made import named


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "mask" not in layer.pieces.names() or "keep" in layer.arguments or "positions" in layer.arguments:
        return

    def route(p: Pieces, *inputs: Any, **given: Any) -> Gradients:
        batch = len(inputs[0])
        found = layer.steps(p, *map(_joined, inputs), **given)
        return tuple(_apart(g, batch) for g in found)

    yield named(
        layer,
        "the batch is treated as one long sequence: tokens attend to tokens of other sequences",
        "keep the batch axis, or loop over it: attention acts on every sequence for itself",
        lambda p, case: {"route": route},
        "route",
    )


def _joined(x: Any) -> Any:
    """(B, T, C) -> (1, B·T, C), (B, H, T, D) -> (1, H, B·T, D)."""
    if np.ndim(x) == 3:
        return x.reshape(1, -1, x.shape[-1])
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[-1]) if np.ndim(x) == 4 else x


def _apart(x: Array, batch: int) -> Array:
    """The reverse."""
    if x.ndim == 3:
        return x.reshape(batch, -1, x.shape[-1])
    return x[0].reshape(x.shape[1], batch, -1, x.shape[-1]).swapaxes(0, 1) if x.ndim == 4 else x
