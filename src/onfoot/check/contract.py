"""The contract that a function must meet to be checked as a layer, and the mistakes that are recognised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onfoot.check.layer import Layer
from onfoot.check.mistakes import mistakes_of
from onfoot.check.text import wrapped


@dataclass(frozen=True)
class Contract:
    layer: Layer
    options: Mapping[str, Any]
    passed: bool = True  # nothing is checked, so nothing can fail

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        layer = self.layer
        yield f"{layer.name} · contract"
        for line in (layer.signature, *layer.contract):
            yield from wrapped(line, "  ")
        if layer.options:
            options = ", ".join(f"{name}={value}" for name, value in self.options.items())
            yield from wrapped(f"options, passed as keyword arguments if the function accepts them: {options}", "  ")
        known = mistakes_of(layer, self.options)
        yield ""
        yield f"{len(known)} known mistakes, recognised alone and in pairs:"
        for mistake in known:
            yield f"  {mistake.name}"

    def to_dict(self) -> dict[str, Any]:
        layer = self.layer
        return {
            "layer": layer.name,
            "signature": layer.signature,
            "contract": list(layer.contract),
            "options": dict(self.options),
            "mistakes": [
                {"name": m.name, "explains": m.explains, "equation": m.equation, "fix": m.fix, "errata": m.errata}
                for m in mistakes_of(layer, self.options)
            ],
        }
