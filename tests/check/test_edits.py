"""Wrong backward passes that are no entry of the catalogue are named by what was edited."""

from __future__ import annotations

import re

import numpy as np
import pytest
from edits import EDITS, HARD, SOURCES, Edit, compiled

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.words import formula

SLOWER = ("multi_head", "head")


def first_finding(edit: Edit, seed: int) -> str:
    report = check_layer(LAYERS[edit.layer], edit.function(), seed=seed, dtypes=["float64"])
    assert report.diagnosis is not None, f"nothing was found wrong\n{report}"
    assert report.diagnosis.findings, str(report)
    assert report.diagnosis.residual < 1e-9
    finding = report.diagnosis.findings[0]
    return f"{finding.name}, {finding.value}"


@pytest.mark.parametrize("layer", SOURCES)
def test_the_function_that_is_edited_is_right(layer: str) -> None:
    report = check_layer(LAYERS[layer], compiled(SOURCES[layer]), dtypes=["float64"])
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(e, id=e.id, marks=pytest.mark.slow if e.layer in SLOWER or i % 3 else [])
        for i, e in enumerate(EDITS)
    ],
)
def test_an_edited_line_is_named_first(edit: Edit, fresh: int) -> None:
    assert re.search(edit.says, first_finding(edit, fresh))


@pytest.mark.parametrize("edit", HARD, ids=lambda e: e.id)
def test_an_edit_that_no_probe_reproduces_gets_no_name(edit: Edit, fresh: int) -> None:
    report = check_layer(LAYERS[edit.layer], edit.function(), seed=fresh, dtypes=["float64"])
    assert report.diagnosis is not None
    assert report.diagnosis.findings == [] and report.diagnosis.unexplained


def layer_norm(x, weight, bias, dout, eps=1e-5):
    c = x - x.mean(-1, keepdims=True)
    inv = (c.var(-1, keepdims=True) + eps) ** -0.5
    z, g = c * inv, dout * weight
    dx = inv * (g - g.mean(-1, keepdims=True) - z * (g * z).mean(-1, keepdims=True))
    return dx, (dout * z).sum((0, 1)), dout.sum((0, 1))


def test_nan_in_one_case_does_not_silence_the_others() -> None:
    def backward(x, weight, bias, dout):
        dx, dweight, dbias = layer_norm(x, weight, bias, dout)
        flat = np.ptp(x, axis=-1, keepdims=True) == 0
        return np.where(flat, np.nan, 3 * dx), dweight, dbias

    report = check_layer(LAYERS["layer_norm"], backward, dtypes=["float64"])
    assert report.diagnosis is not None
    assert [f.name for f in report.diagnosis.findings] == ["dx is 3 times too large"]
    assert "leaves out the cases with nan or infinite entries: “constant rows”" in str(report)


def test_none_means_not_computed_and_the_rest_is_judged() -> None:
    def only_dx(x, weight, bias, dout):
        return layer_norm(x, weight, bias, dout)[0], None, None

    report = check_layer(LAYERS["layer_norm"], only_dx)
    assert report.passed, str(report)
    assert "not given, and not judged: dweight, dbias" in str(report)

    def wrong_dx(x, weight, bias, dout):
        return -layer_norm(x, weight, bias, dout)[0], None, None

    report = check_layer(LAYERS["layer_norm"], wrong_dx)
    assert report.wrong == ["dx"] and report.diagnosis is not None
    assert [f.name for f in report.diagnosis.findings] == ["dx has the wrong sign"]


def test_only_none_fails() -> None:
    assert not check_layer(LAYERS["layer_norm"], lambda *a: (None, None, None)).passed


def test_a_right_function_that_writes_into_its_arguments_gets_a_warning_with_the_line() -> None:
    def backward(x, weight, bias, dout):
        found = layer_norm(x, weight, bias, dout)
        dout *= weight
        return found

    report = check_layer(LAYERS["layer_norm"], backward)
    assert report.passed, str(report)
    assert "it modifies its argument dout in place (test_edits.py, line " in report.warnings[0]


@pytest.mark.parametrize(("layer", "option"), [("layer_norm", "eps"), ("adamw", "weight_decay")])
def test_an_option_of_0_is_allowed(layer: str, option: str) -> None:
    right = {"layer_norm": layer_norm, "adamw": compiled(SOURCES["adamw"].replace("1e-8, 0.1", "1e-8, 0.0"))}[layer]
    report = check_layer(LAYERS[layer], right, **{option: 0.0})
    assert report.passed, str(report)
    with pytest.raises(ValueError, match=f"{option} must be >= 0"):
        check_layer(LAYERS[layer], right, **{option: -1.0})


def test_the_same_factor_on_several_gradients_is_one_cause() -> None:
    def backward(x, weight, bias, dout):
        return tuple(x.shape[1] * g for g in layer_norm(x, weight, bias, dout))

    report = check_layer(LAYERS["layer_norm"], backward, dtypes=["float64"])
    assert report.diagnosis is not None
    (finding,) = report.diagnosis.findings
    assert finding.gradients == ["dx", "dweight", "dbias"]


def test_the_words_of_every_piece_of_every_layer_are_known() -> None:
    unknown = {
        (layer.name, piece)
        for layer in LAYERS.values()
        for piece in layer.pieces.names()
        if not formula(piece, layer.name)
    }
    assert unknown == set()
