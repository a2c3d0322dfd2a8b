"""A slice of the campaign `right`: random right functions, none of which the check may call wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaigns import right
from campaigns.right_functions import MAKERS
from campaigns.right_functions.holding import ARRAYS, HOLDERS
from onfoot.check.layers import LAYERS

RECORD = Path(right.__file__).parent / "results" / "right.json"


def test_no_right_function_is_called_wrong() -> None:
    outcome = right.joined([right.piece(15, 0, 40), right.piece(15, 40, 60)])
    assert outcome.failures == []
    assert outcome.figures["passed"] == 60
    assert outcome.figures["different functions"] > 55
    assert 0 < outcome.figures["largest float64 error over its limit"] < 1


def test_functions_of_every_layer_are_drawn() -> None:
    assert set(MAKERS) == set(LAYERS)


@pytest.mark.parametrize("layer", MAKERS)
def test_there_is_no_false_alarm_in_any_layer(layer: str, fresh: int) -> None:
    for index in range(2):
        one, wrong, _ = right.attempt(fresh, index, layer)
        assert not wrong, f"seed {fresh} index {index}: {wrong}; {one.name}; {one.options} {one.settings} {one.sizes}"


@pytest.mark.parametrize("index", [7000, 7427])
def test_what_was_called_wrong_once_is_not_any_more(index: int) -> None:
    """A tolerance of a tenth and more, and rounding that a temperature of 1.00000002 would explain."""
    one, wrong, _ = right.attempt(21, index)
    assert not wrong, f"{wrong}; {one.name}"


@pytest.mark.parametrize("layer", MAKERS)
def test_the_functions_of_every_layer_are_right_by_autograd(layer: str) -> None:
    names = set()
    for index in range(8):
        one = right.draw(7, index, layer)
        assert right.proven(one, np.random.default_rng([7, index])) <= right.PROOF, one.name
        names.add(one.name)
    assert len(names) > 5


def test_the_committed_run_has_ten_thousand_functions_of_all_layers_and_no_false_alarm() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["count"] >= 10_000 and record["failures"] == []
    assert record["figures"]["passed"] == record["count"]
    assert set(record["figures"]["per layer"]) == set(LAYERS) and len(LAYERS) >= 32
    assert record["figures"]["different functions"] > 0.95 * record["count"]


def planted(one: right.Draw, factor: float) -> None:
    """Makes the first gradient of the drawn function too large."""
    real = one.function

    def wrong(*inputs: Any, **options: Any) -> Any:
        first, *rest = real(*inputs, **options)
        return (first * factor, *rest)

    one.function = wrong


def test_a_function_that_is_slightly_off_is_not_taken_for_right() -> None:
    one = right.draw(7, 0, "layer_norm")
    planted(one, 1 + 1e-8)
    assert right.proven(one, np.random.default_rng(7)) > right.PROOF


def test_a_false_alarm_is_reported_with_what_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onfoot.check.budget.ALLOWED", 1e-3)
    monkeypatch.setattr("onfoot.check.single.FACTOR", 1.0)
    index = next(i for i in range(500) if right.draw(3, i).layer == "linear")
    one, wrong, report = right.attempt(3, index)
    assert report is not None and not report.passed
    assert wrong.startswith("called wrong in ") and "by autograd it is right to " in wrong
    assert one.name.startswith("linear: ")


def test_a_check_that_raises_is_a_failure_of_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*arguments: Any, **more: Any) -> Any:
        raise ZeroDivisionError("no targets")

    monkeypatch.setattr(right, "check_layer", raising)
    (failure,) = right.piece(3, 0, 1)["failures"]
    assert "seed 3 index 0, the check raised ZeroDivisionError: no targets" in failure


def test_a_piece_whose_process_crashes_is_a_failure_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(command: list[str], **more: Any) -> Any:
        if command[-2] == "0":
            return subprocess.CompletedProcess(command, -11, "", "")
        found = {"draws": 5, "layers": {"gelu": 5}, "notes": 1, "names": ["a", "b"], "most": 0.5, "failures": []}
        return subprocess.CompletedProcess(command, 0, json.dumps(found), "")

    monkeypatch.setattr(right.subprocess, "run", ends)
    outcome = right.run(right.PIECE + 5, seed=1)
    assert outcome.failures == ["seed 1 from 0 to 1000: the process ended with -11 "]
    assert outcome.figures["per layer"] == {"gelu": 5} and outcome.figures["different functions"] == 2


@pytest.mark.parametrize("kind", ARRAYS)
def test_every_kind_of_array_holds_the_same_numbers(kind: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 4, 5))
    got = ARRAYS[kind](x)
    np.testing.assert_array_equal(np.asarray(got.detach() if hasattr(got, "detach") else got), x)


def test_every_holder_has_the_gradients_under_their_names_or_in_order() -> None:
    grads, names = [np.ones(2), np.zeros(3)], ("dx", "dweight")
    for make in HOLDERS.values():
        found = make(grads, names)
        parts = [found[name] for name in names] if isinstance(found, dict) else list(found)[:2]
        assert [part is g for part, g in zip(parts, grads, strict=True)] == [True, True]


def test_the_same_seed_draws_the_same_function() -> None:
    names = []
    for _ in range(2):
        one = right.draw(11, 5)
        right.proven(one, np.random.default_rng(0))
        names.append((one.name, one.options, one.settings, one.sizes))
    assert names[0] == names[1]
