"""Correct implementations pass, however they are written, in NumPy, in PyTorch and in float32."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from right import RIGHT

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS

EVERY = [(layer, function) for layer, functions in RIGHT.items() for function in functions]


def test_every_layer_has_right_implementations() -> None:
    assert set(RIGHT) == set(LAYERS)


@pytest.mark.parametrize(("layer", "function"), EVERY, ids=lambda one: getattr(one, "__name__", one))
def test_a_right_implementation_passes(layer: str, function) -> None:
    report = check_layer(LAYERS[layer], function, seed=6150)
    assert report.passed, str(report)


NON_CAUSAL = ["attention", "multi_head", "attention_dropout", "rope_attention", "grouped_query_attention"]
NON_CAUSAL += ["self_attention", "self_attention_separate"]


@pytest.mark.parametrize("layer", NON_CAUSAL)
def test_non_causal_attention_passes_with_causal_false(layer: str) -> None:
    for function in [f for f in RIGHT[layer] if "causal" in inspect.signature(f).parameters]:
        report = check_layer(LAYERS[layer], function, causal=False, seed=77)
        assert report.passed, str(report)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_single_dtype_can_be_requested(dtype: str) -> None:
    report = check_layer(LAYERS["attention"], RIGHT["attention"][0], dtypes=[dtype])
    assert report.passed
    assert {o.dtype for o in report.outcomes} == {dtype}


def test_a_mistake_no_larger_than_float32s_rounding_is_not_taken_for_it() -> None:
    def backward(x, weight, bias, dout):
        sigma = np.sqrt(x.var(axis=-1, keepdims=True) + 3e-6)  # for 1e-5, on rows of variance 1
        z, g = (x - x.mean(axis=-1, keepdims=True)) / sigma, dout * weight
        dx = (g - g.mean(axis=-1, keepdims=True) - z * (g * z).mean(axis=-1, keepdims=True)) / sigma
        return dx, (dout * z).sum(axis=(0, 1)), dout.sum(axis=(0, 1))

    assert not check_layer(LAYERS["layer_norm"], backward).passed


def test_float32_inside_gives_a_warning() -> None:
    inside = next(f for f in RIGHT["attention"] if f.__name__ == "by_autograd_in_float32")
    report = check_layer(LAYERS["attention"], inside, arrays="torch")
    assert report.passed
    assert "only as accurate as float32" in report.warnings[0]
