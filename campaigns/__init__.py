"""Campaigns: attacks on onfoot that run for minutes to hours, and go on finding what tests were not written for.

`python -m campaigns` lists them, `python -m campaigns fuzz --count 200000 --seed 7` runs one, and `make campaign` runs
all of them. Each is one module with a docstring, a default `COUNT`, and `run(count, seed) -> Outcome`. The same seed
gives the same attack. Figures go to `campaigns/results/`, and docs/reliability.md quotes them. A slice of each runs in
`make test` (tests/campaigns/).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CAMPAIGNS = ("fuzz", "kills", "arrays", "threads", "engines", "machines", "mutants", "right")


@dataclass
class Outcome:
    """What a campaign tried and found: figures to quote, and one line per failure, enough to repeat it."""

    figures: dict[str, Any]
    failures: list[str] = field(default_factory=list)
