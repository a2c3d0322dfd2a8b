"""A right gradient in a wrong shape is named as that, and is not taken for another layout of the arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.forms import Expected, forms_of
from onfoot.check.known import check_layer
from onfoot.check.layer import Layer
from onfoot.check.layers import LAYERS
from onfoot.check.plan import Chooser, Trial

Shape = Callable[[np.ndarray], np.ndarray]

SHAPES: dict[str, tuple[int, Shape]] = {  # the axes that are needed, and what is returned
    "transposed": (2, lambda g: np.swapaxes(g, -1, -2)),
    "an axis too many in front": (0, lambda g: g[None]),
    "an axis too many behind": (0, lambda g: g[..., None]),
    "flattened": (2, lambda g: g.reshape(-1)),
    "rows": (3, lambda g: g.reshape(-1, g.shape[-1])),
}


def changed(layer: Layer, g: int, shape: Shape, alone: bool = False) -> Callable[..., object]:
    """The right gradients, of which one is returned in another shape."""

    def function(*inputs):
        found = list(layer.reference(*inputs, **layer.options))
        found[g] = shape(found[g])
        return found[g] if alone else tuple(found)

    return function


def chosen(layer: Layer, function: Callable[..., object]) -> Trial:
    case = first_case(layer, 1, layer.options, ANY)
    expected = Expected(layer.name, layer.arguments, layer.gradients, layer.options, layer.upstream_optional)
    return Chooser(layer, layer.options, case, "float64").choose(forms_of(function, expected), "numpy", "auto")


@pytest.mark.parametrize("name", LAYERS)
def test_a_wrong_shape_is_not_taken_for_another_layout(name: str) -> None:
    layer = LAYERS[name]
    right = layer.reference(*first_case(layer, 1, layer.options, ANY).inputs, **layer.options)
    for g, gradient in enumerate(layer.gradients):
        for axes, shape in SHAPES.values():
            if right[g].ndim < axes or shape(right[g]).shape == right[g].shape:
                continue
            if np.linalg.norm(right[g]) < 1e-9:  # db_k is 0 but for rounding
                continue
            trial = chosen(layer, changed(layer, g, shape))
            assert trial.plan.layout.words == "" and trial.misshapen == 1, gradient
            alone = chosen(layer, changed(layer, g, shape, alone=True))
            assert alone.plan.layout.words == "", gradient
            assert not alone.all_right or shape(right[g]).shape in [r.shape for r in right], gradient


NAMED = {
    "transposed": "dx is transposed",
    "an axis too many in front": "dx is right but for its shape, (1, 4, 6, 5) for (4, 6, 5) (keepdims)",
    "flattened": "dx is right but for its shape, (120,) for (4, 6, 5): a reshape is missing",
    "rows": "dx is right but for its shape, (24, 5) for (4, 6, 5): a reshape is missing",
}


@pytest.mark.parametrize("how", NAMED)
@pytest.mark.parametrize("name", ["relu", "gelu", "softmax"])
def test_the_shape_is_named(name: str, how: str) -> None:
    report = check_layer(LAYERS[name], changed(LAYERS[name], 0, SHAPES[how][1]), dtypes="float64")
    assert report.recognised == "" and report.wrong == ["dx"] and report.verdict == f"wrong: dx; {NAMED[how]}"
    assert report.diagnosis is not None and report.diagnosis.complete
    assert report.to_dict()["wrong"] == ["dx"] and "✗ wrong: dx" in str(report)


@pytest.mark.parametrize(("name", "g"), [("linear", 0), ("swiglu", 0), ("swiglu", 1)])
def test_rows_alone_from_inputs_with_tokens_are_a_wrong_shape(name: str, g: int) -> None:
    layer = LAYERS[name]
    report = check_layer(layer, changed(layer, g, SHAPES["rows"][1], alone=True), dtypes="float64")
    assert report.wrong == [layer.gradients[g]] and "right but for its shape" in report.verdict


@pytest.mark.parametrize("name", ["rope", "linear", "softmax_cross_entropy"])
def test_a_number_as_upstream_gradient_or_several_heads_do_not_matter(name: str) -> None:
    layer = LAYERS[name]
    report = check_layer(layer, changed(layer, 0, SHAPES["an axis too many in front"][1]), dtypes="float64")
    assert report.wrong == [layer.gradients[0]] and "(keepdims)" in report.verdict


def test_a_bias_that_is_not_summed_is_wrong_and_named_in_one_line() -> None:
    def backward(x, weight, bias, dout):
        return dout @ weight.T, np.einsum("bti,bto->io", x, dout), dout

    report = check_layer(LAYERS["linear"], backward, dtypes="float64")
    assert report.wrong == ["dbias"]
    assert report.verdict == "wrong: dbias; dbias is not summed over batch and tokens (one per token)"
