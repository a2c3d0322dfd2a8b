"""How much of some work is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Count:
    """How much of some work is done: whoever works adds to it, and whoever shows it reads it."""

    unit: str  # such as "examples"; "bytes" are shown as MB
    total: int = 0  # 0: not known
    done: int = 0

    def __str__(self) -> str:
        scale, unit = (1e6, "MB") if self.unit == "bytes" else (1, self.unit)
        of = f" of {self.total / scale:,.0f}" if self.total else ""
        return f"{self.done / scale:,.0f}{of} {unit}"
