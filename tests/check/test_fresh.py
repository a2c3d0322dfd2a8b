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


# quick ones of the sets that were opened after the development half, one per layer
OPENED = {
    "fourth": (
        "silu_version_5",
        "softmax_version_1",
        "embedding_version_5",
        "swiglu_version_3",
        "rope_version_1",
        "adamw_version_3",
        "linear_version_2",
        "tied_embedding_version_1",
        "next_token_loss_version_5",
        "rms_norm_version_4",
        "layer_norm_version_5",
        "gelu_version_4",
        "attention_version_1",
    ),
    "final": ("adamw_defaults_v2", "ln_bwd_staged_v2", "tied_grad_torch", "quick_gelu_grad", "attention_backward_v2"),
}


@pytest.mark.parametrize(("half", "name"), [(half, name) for half, names in OPENED.items() for name in names])
def test_a_mistake_of_an_opened_set_is_found_and_its_label_is_not_stale(half: str, name: str) -> None:
    result = measure.checked(half, name)
    assert result["wrong"] == result["declared"]
    assert measure.label_of(result, measure.read_labels(half)) == "first", result["names"]


@pytest.mark.slow
@pytest.mark.parametrize("half", measure.SETS)
def test_all_of_a_set_is_found_and_no_label_is_stale(half: str) -> None:
    found = measure.totals(measure.measure(half), measure.read_labels(half))
    assert found["found"] == found["wrong"] and found["false alarms"] == 0
    assert found["stale"] == 0


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


# as each set was opened: found / named first / named among three / misnamed / false alarms; – was not recorded
OPENINGS = {
    "final": ("109", "88", "90", "0", "–"),
    "third": ("129", "81 %", "–", "6", "0"),
    "fourth": ("128", "114", "114", "1", "1"),
}


def row(half: str) -> list[str]:
    """The cells of a set's line in the guide's table."""
    lines = (FRESH.parents[2] / "docs" / "check.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| [{half}]"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def with_share(count: str, of: int) -> str:
    return count if not count.isdigit() else f"{count} ({int(count) / of:.0%})".replace("%", " %")


@pytest.mark.parametrize("half", measure.SETS)
def test_the_guide_has_the_figures_of_every_set(half: str) -> None:
    cases = measure.cases_of(half)
    wrong = sum(case.mistake is not None for case in cases.values())
    if half in OPENINGS:
        found, first, three, misnamed, alarms = OPENINGS[half]
    else:  # tuned on: as it is now
        given = [one["label"] for one in measure.read_labels(half).values()]
        first, three = str(given.count("first")), str(given.count("first") + given.count("among three"))
        found, misnamed, alarms = str(wrong), str(given.count("misnamed")), "0"
    named = [with_share(first, wrong), with_share(three, wrong)]
    assert row(half) == [f"{wrong} / {len(cases) - wrong}", found, *named, misnamed, alarms]


def test_the_labels_of_the_last_set_are_those_of_its_opening() -> None:
    given = [one["label"] for one in measure.read_labels("fourth").values()]
    assert (given.count("first"), given.count("misnamed")) == (114, 1)


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
