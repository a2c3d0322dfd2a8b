"""A slice of the campaign `engines`: random configurations against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")


def test_engines_agree_with_float64_on_random_configurations() -> None:
    from campaigns import engines

    outcome = engines.run(10, seed=15)
    assert outcome.failures == []
    assert 0 < outcome.figures["worst error of a gradient over its limit"] < 1


def test_a_gradient_that_is_slightly_off_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from campaigns import engines

    real = engines.Model.loss_and_grads

    def wrong(model: Any, **asked: Any) -> Any:
        loss, grads = real(model, **asked)
        name = max(grads, key=lambda n: float(np.linalg.norm(grads[n])))
        if model.dtype == "float32":
            grads[name] = grads[name] * np.float32(1 + 1e-4)
        return loss, grads

    monkeypatch.setattr(engines.Model, "loss_and_grads", wrong)
    assert len(engines.attempt(15, 0)[1]) == 2  # one on each engine
