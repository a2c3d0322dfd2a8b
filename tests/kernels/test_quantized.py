"""Products with weights in blocks, against the same products with the floats that the codes stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onfoot import kernels, ops
from onfoot.kernels.self_test import FROZEN, frozen

pytest.importorskip("numba")
TABLE = kernels.table()


def close(ours: np.ndarray, truth: np.ndarray) -> bool:
    assert ours.dtype == np.float32 and ours.shape == truth.shape
    return bool(np.linalg.norm(ours - truth) <= 2e-6 * np.linalg.norm(truth))


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(FROZEN),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    outputs=st.integers(8, 90),  # of a single one the terms may cancel, and the error is that of the terms
    with_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_weight_in_blocks_gives_the_products_of_its_floats(
    kind: str, rows: int, blocks: int, outputs: int, with_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    codes = frozen(rng, kind, outputs, 32 * blocks)
    x, dy = (rng.standard_normal((rows, n)).astype(np.float32) for n in (32 * blocks, outputs))
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    exact = codes.floats(slice(None), np.float64).T  # (in, out)
    y, saved = TABLE["frozen_linear_forward"](x, codes.T, bias)
    assert close(y, ops.frozen_linear_forward(x.astype(np.float64), exact, bias)[0])
    assert close(TABLE["frozen_linear_backward"](dy, saved), dy.astype(np.float64) @ exact.T)
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((32 * blocks, 3), (3, outputs)))
    y, saved = TABLE["lora_linear_forward"](x, codes.T, bias, down, up, 0.5)
    truth, s_truth = ops.lora_linear_forward(
        x.astype(np.float64), exact, bias, down.astype(np.float64), up.astype(np.float64), 0.5
    )
    assert close(y, truth)
    for ours, right in zip(
        TABLE["lora_linear_backward"](dy, saved), ops.lora_linear_backward(dy.astype(np.float64), s_truth), strict=True
    ):
        assert close(ours, right)
    targets = rng.integers(0, outputs, rows)
    loss, saved = TABLE["frozen_logits_loss_forward"](x, codes, bias, targets, 3.0)
    logits, _ = ops.frozen_linear_forward(x.astype(np.float64), exact, bias)
    right, s_right = ops.cross_entropy_forward(logits, targets, 3.0)
    assert loss == pytest.approx(right, rel=1e-5, abs=1e-6)
    if outputs > 1:
        dx = ops.cross_entropy_backward(1.0, s_right) @ exact.T
        assert np.linalg.norm(TABLE["frozen_logits_loss_backward"](1.0, saved) - dx) <= 5e-6 * max(
            np.linalg.norm(dx), 1
        )
