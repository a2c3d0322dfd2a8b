"""A slice of the campaign `threads`: several Python threads at once."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")


def test_results_do_not_depend_on_other_threads() -> None:
    from campaigns import threads

    outcome = threads.run(500, seed=15)
    assert outcome.failures == []
    assert outcome.figures["one-row logits"] == 500 and len(outcome.figures) == 9  # each kind of work was done


def test_a_wrong_result_would_be_seen() -> None:
    from campaigns.threads import PROMPTS, Beside

    beside = Beside({"work": [b"1"] * PROMPTS})
    beside.count("work", lambda i: b"2" if i == 3 else b"1", 8)
    assert len(beside.wrong) == 1 and "prompt 3" in beside.wrong[0]
