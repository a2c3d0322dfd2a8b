"""What a route is: a backward pass of a layer by other steps than the layer's own, which give the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onfoot.check.layer import Gradients, Pieces


@dataclass(frozen=True)
class Route:
    """Another derivation of a layer's gradients; its steps may use the layer's pieces besides its own."""

    layer: str
    pieces: Pieces  # those that the layer itself does not have
    steps: Callable[..., Gradients]  # (pieces, *inputs, **options)
    words: Mapping[str, tuple[str, str]]  # piece: (what it is, its right formula)
    needs: Mapping[str, Any] = field(default_factory=dict)  # options that must be set
