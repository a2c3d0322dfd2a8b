"""A slice of the corpus of fresh mistakes: found, and named as its labels say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FRESH = Path(__file__).parent / "fresh"
sys.path.insert(0, str(FRESH))

import measure  # noqa: E402

HALF = "development"
# quick ones, of different layers and kinds of names
WRONG = (
    "flash_bwd_v3",
    "torch_attention_bwd",
    "head_backward_v4",
    "layernorm_grad_formula",
    "norm_with_eps",
    "rms_bwd_simple",
    "matmul_backward_blocked_v2",
    "lora_loop_tokens_v2",
    "embedding_set_rows",
    "tied_embedding_backward_v2",
    "prob_loss_backward",
    "next_token_backward_v2",
    "gelu_backward_c",
    "glu_grads",
    "swiglu_saved_v2",
    "rope_backward_v3",
    "adamw_loops",
)
RIGHT = ("fc_vjp", "rms_norm_function_grads", "lora_backward", "embedding_sorted", "gelu_sigmoid_form", "swiglu_saved")


@pytest.mark.parametrize("name", WRONG)
def test_a_fresh_mistake_is_found_and_named_first(name: str) -> None:
    result = measure.checked(HALF, name)
    assert result["wrong"] == result["declared"]
    assert result["residual"] < 1e-9
    assert measure.label_of(result, measure.read_labels(HALF)) == "first", result["names"]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_of_the_corpus_passes(name: str) -> None:
    assert measure.checked(HALF, name)["passed"]


def test_a_mistake_that_ended_the_search_with_an_error_is_found() -> None:
    """Its factors broadcast a number to the shape of a matrix."""
    result = measure.checked("third", "adamw_step_fused")
    assert result["wrong"] == result["declared"]


def test_every_wrong_case_has_a_label_and_none_is_misnamed() -> None:
    labels = measure.read_labels(HALF)
    wrong = {name for name, case in measure.cases_of(HALF).items() if case.mistake is not None}
    assert set(labels) == wrong
    given = [one["label"] for one in labels.values()]
    assert set(given) <= set(measure.LABELS) and "misnamed" not in given
    assert given.count("first") >= 0.9 * len(given)


def test_the_guide_has_the_figures_of_the_last_set() -> None:
    labels, cases = measure.read_labels("fourth"), measure.cases_of("fourth")
    given = [one["label"] for one in labels.values()]
    wrong = {name for name, case in cases.items() if case.mistake is not None}
    first, misnamed = given.count("first"), given.count("misnamed")
    assert set(labels) <= wrong
    text = " ".join((FRESH.parents[2] / "docs" / "check.md").read_text(encoding="utf-8").split())
    assert f"{len(wrong)} wrong functions and {len(cases) - len(wrong)} right ones" in text
    assert f"{first} ({first / len(wrong):.0%}) were named first".replace("%", " %") in text
    assert (
        f"{len(wrong) - len(labels)} had no name, and {misnamed} ({misnamed / len(wrong):.0%})".replace("%", " %")
        in text
    )


def result(**changes: Any) -> dict[str, Any]:
    usual = {"case": "f", "mistake": "…", "names": ["a"], "passed": False, "declared": ["dx"], "wrong": ["dx"]}
    return {**usual, "seconds": 1.0, **changes}


def test_a_label_of_other_names_is_stale() -> None:
    labels = {"f": {"label": "first", "digest": measure.digest(["a"])}}
    assert measure.label_of(result(), labels) == "first"
    assert measure.label_of(result(names=["a", "b"]), labels) == "stale"
    assert measure.label_of(result(names=[]), labels) == "none"
    assert measure.label_of(result(case="g"), labels) == "not judged"


def test_totals_count_what_was_found_named_and_misjudged() -> None:
    labels = {"f": {"label": "first", "digest": measure.digest(["a"])}}
    missed = result(case="g", names=[], passed=True, wrong=[])
    alarm = result(case="h", mistake=None, declared=[], wrong=["dx"])
    found = measure.totals([result(), missed, alarm], labels)
    assert (found["wrong"], found["found"], found["named first"], found["nothing named"]) == (2, 1, 1, 1)
    assert (found["right"], found["false alarms"], found["gradients misjudged"]) == (1, 1, 2)
