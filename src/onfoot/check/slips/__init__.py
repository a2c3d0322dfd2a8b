"""Slips that neither the catalogue nor a generic probe has: another constant, or another function's gradient.

A constant is a `Mistake` with an unknown number, such as “right with eps = 1e-12”, which is fitted to what the function
returned; it explains the result only if the fit leaves rounding error. One that depends on the case, such as √d_v in
place of √d_k, is tried by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onfoot.check.layer import Layer, Mistake
from onfoot.check.slips import (
    attention,
    caches,
    dropout,
    gates,
    gelu,
    heads,
    linear,
    losses,
    norms,
    positions,
    preferences,
    sequences,
    tables,
    targets,
    updates,
)
from onfoot.check.slips.made import STARTS, option

TOPICS = (
    *(norms, positions, attention, heads, dropout, gelu, gates, losses, targets, updates, tables, linear, sequences),
    *(caches, preferences),
)


def slips(layer: Layer, options: Mapping[str, Any]) -> Iterator[Mistake]:
    """The slips of a layer with these options."""
    for name in layer.options:
        if name in STARTS:
            yield option(layer, name, options.get(name, layer.options[name]))
    for topic in TOPICS:
        yield from topic.slips(layer, options)
