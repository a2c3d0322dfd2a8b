"""The committed measurements of how long the page takes to open meet the promises about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "explore_load.json"
SECONDS = {"default": 4, "gpt2": 10, "smollm2": 15}  # from the command to the first numbers, the slowest run
FIRST_NUMBERS = {"default": 1, "gpt2": 1}  # from the request to the first numbers, the median, in seconds
BYTES = {"gpt2": 1.2e9}  # at most, in memory


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, float]]:
    found = json.loads(MEASURED.read_text(encoding="utf-8"))["models"]
    assert set(found) == set(SECONDS) and all(one["runs"] >= 5 for one in found.values())
    return found


def test_every_model_opens_within_its_limit(models: dict[str, dict[str, float]]) -> None:
    slowest = {name: one["command_range"][1] + one["page_range"][1] for name, one in models.items()}  # type: ignore[index]
    assert [name for name, seconds in slowest.items() if not 0.1 < seconds <= SECONDS[name]] == []


def test_the_first_numbers_are_there_within_a_second(models: dict[str, dict[str, float]]) -> None:
    pages = {name: models[name]["page"] for name in FIRST_NUMBERS}
    assert [name for name, seconds in pages.items() if not 0.01 < seconds < FIRST_NUMBERS[name]] == []


def test_gpt2_with_124_million_parameters_needs_little_memory(models: dict[str, dict[str, float]]) -> None:
    assert [name for name, most in BYTES.items() if not 1e8 < models[name]["peak_bytes"] <= most] == []
