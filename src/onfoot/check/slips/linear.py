"""Slips in linear layers: sums over tokens taken before the product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Layer, Mistake
from onfoot.check.slips.made import named

FIX = "multiply first, then sum: dweight = Σ over all tokens of xᵗ dout"


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    if "dweight" not in layer.pieces.names():
        return
    for words, axes in (
        ("all tokens", (0, 1)),
        ("the tokens of each sequence", (1,)),
        ("the sequences at each position", (0,)),
    ):
        yield named(
            layer,
            f"x and dout are each summed over {words} before they are multiplied",
            FIX,
            lambda p, case, axes=axes: {
                "dweight": lambda x, dy: p.dweight(
                    np.sum(x, axis=axes, keepdims=True), np.sum(dy, axis=axes, keepdims=True)
                )
            },
            "dweight",
        )
