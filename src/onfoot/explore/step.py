"""A row of the map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Step:
    """An activation, its error signal, and the parameters that the step owns, all by the ids of their arrays."""

    id: str
    name: str
    forward: str
    backward: str | None = None
    parameters: list[tuple[str, str]] = field(default_factory=list)  # (parameter, gradient)
    inside: list[str] = field(default_factory=list)  # arrays that the formulas name in passing
    block: int | None = None
    head: int | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
