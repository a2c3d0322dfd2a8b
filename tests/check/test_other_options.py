"""An option that was asked for and is not used: the diagnosis says which value the function has, and which is right."""

from __future__ import annotations

import numpy as np
import pytest

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS


def rope_with(theta: float):
    def backward(x, positions, dout):
        half = x.shape[-1] // 2
        angle = positions[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        first, second = dout[..., :half], dout[..., half:]
        return np.concatenate([first * cos + second * sin, second * cos - first * sin], -1)

    return backward


@pytest.mark.parametrize(("used", "wanted"), [(10000.0, 500000.0), (500000.0, 10000.0), (777.0, 2e4)])
def test_the_value_that_is_used_and_the_one_that_was_asked_for_are_named(used: float, wanted: float) -> None:
    report = check_layer(LAYERS["rope"], rope_with(used), theta=wanted)
    assert not report.passed and report.diagnosis is not None
    (finding,) = report.diagnosis.findings
    assert finding.name == "right with another theta"
    assert finding.value == f"theta = {used:g}"
    assert f"use the theta of the contract, {wanted:g};" in finding.fix
    assert check_layer(LAYERS["rope"], rope_with(used), theta=used).passed
