"""A factor of a batch, of the tokens, of both or of √d has the name of that size in every layer."""

from __future__ import annotations

import math

import pytest

from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.case_sizes import ANY, first_case
from onfoot.check.changes import _factor
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS

WIDTHS = ("d_k", "d", "D", "d_model")
UPDATES = ("adamw", "adamw_step")  # what they return is not proportional to a gradient
TOKENS = [
    name
    for name, layer in LAYERS.items()
    if {"B", "n"} <= set(first_case(layer, 1, layer.options, ANY).sizes) and name not in UPDATES
]


@pytest.mark.parametrize("name", TOKENS)
def test_the_factor_has_the_name_of_the_size(name: str) -> None:
    layer = LAYERS[name]
    cases = [first_case(layer, seed, layer.options, ANY) for seed in range(1, 6)]
    width = next((size for size in WIDTHS if size in cases[0].sizes), None)
    right = [layer.reference(*case.inputs) for case in cases]
    magnitudes = [[1.0] * len(layer.gradients) for _ in cases]
    wanted = {"B": lambda s: s["B"], "n": lambda s: s["n"], "B·n": lambda s: s["B"] * s["n"]}
    if width:
        wanted[f"√{width}"] = lambda s: math.sqrt(s[width])
    for quantity, size in wanted.items():
        for sign, words in ((1, "large"), (-1, "small")):
            answers = [[size(case.sizes) ** sign * g for g in found] for case, found in zip(cases, right, strict=True)]
            evidence = Evidence(layer, layer.options, cases, answers, magnitudes, "float64")
            for g in filter(evidence.ever_informative, range(len(layer.gradients))):
                (change,) = _factor(evidence, Candidate(), g)
                assert change.name.startswith(f"{layer.gradients[g]} is {quantity} = "), change.name
                assert change.name.endswith(f"times too {words}")


@pytest.mark.parametrize("name", ["attention", "softmax", "rope", "swiglu"])
def test_a_mean_over_all_tokens_is_named_in_the_report(name: str) -> None:
    layer = LAYERS[name]

    def function(*inputs):
        b, n = inputs[0].shape[0], inputs[0].shape[-2]
        return tuple(g / (b * n) for g in layer.reference(*inputs))

    report = check_layer(layer, function, dtypes="float64")
    assert report.diagnosis is not None and report.diagnosis.complete
    assert "B·n" in report.verdict and "times too small" in report.verdict
