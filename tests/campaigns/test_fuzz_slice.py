"""A slice of the campaign `fuzz`: hostile files for every reader, the same ones each time."""

from __future__ import annotations

from campaigns import fuzz


def test_no_reader_fails_otherwise_than_with_a_value_error() -> None:
    outcome = fuzz.run(1500, 15)
    assert outcome.failures == []
    assert outcome.figures["inputs"] == 1500
    assert outcome.figures["refused"] > 700 and outcome.figures["read"] > 200  # neither all nor nothing


def test_the_same_seed_gives_the_same_inputs() -> None:
    assert fuzz.run(40, 3).figures["refused"] == fuzz.run(40, 3).figures["refused"]
