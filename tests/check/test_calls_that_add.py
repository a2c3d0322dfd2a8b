"""A function that adds to its last result is named, also if the first call of every case is right."""

from __future__ import annotations

from typing import Any

import pytest

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS

ADDED = "the gradients of earlier calls are added: a second call returns the first result plus its own"


@pytest.mark.parametrize("name", ["relu", "swiglu", "linear", "rms_norm", "embedding", "dpo", "lora", "rope"])
def test_gradients_that_are_added_between_calls_are_named(name: str) -> None:
    layer, last = LAYERS[name], []

    def function(*inputs: Any) -> Any:
        found = layer.reference(*inputs)
        if last and all(a.shape == b.shape for a, b in zip(found, last[-1], strict=True)):
            found = tuple(a + b for a, b in zip(found, last[-1], strict=True))
        last[:] = [found]
        return found

    report = check_layer(layer, function, dtypes="float64")
    assert not report.passed and report.diagnosis is not None and report.diagnosis.complete
    assert report.verdict.endswith(f"{', '.join(layer.gradients)}: {ADDED}")
