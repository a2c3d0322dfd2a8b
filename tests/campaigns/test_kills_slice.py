"""A slice of the campaign `kills`."""

from __future__ import annotations

import os

import pytest

from campaigns import kills


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_runs_that_are_killed_starved_and_damaged_end_as_undisturbed_ones() -> None:
    outcome = kills.run(15, 3)
    assert outcome.failures == []
    assert outcome.figures["kill"] >= 15 and outcome.figures["ended bit-identical"] == outcome.figures["runs"]
