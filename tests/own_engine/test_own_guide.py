"""docs/own_engine.md has every pair with its gradients (tests/docs runs what it shows)."""

from __future__ import annotations

import re

from onfoot.own_engine.pairs import GRADIENTS, PAIRS
from pages import DOCS

PAGE = (DOCS / "own_engine.md").read_text(encoding="utf-8")


def test_the_guide_has_every_pair_with_its_gradients() -> None:
    table = [row.split("|") for row in PAGE.splitlines() if row.startswith("| `")]
    rows = {name: cells[3] for cells in table for name in re.findall(r"`(\w+)`", cells[1])}
    assert set(PAIRS) == set(rows)
    for pair, arguments in GRADIENTS.items():
        found = [f"d{name}" for name in arguments]
        assert re.findall(r"\bd[a-z]+\b", rows[pair])[: len(found)] == found, pair
