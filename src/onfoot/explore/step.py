"""A row of the map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Step:
    """A step of the network: the ids of its activation, its error signal and its parameters."""

    id: str
    name: str
    forward: str
    backward: str | None = None
    parameters: list[tuple[str, str]] = field(default_factory=list)  # (parameter, gradient)
    inside: list[str] = field(default_factory=list)  # intermediate values in the formulas
    block: int | None = None
    head: int | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
