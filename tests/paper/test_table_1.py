"""Table 1, row by row: every intermediate of one head, and the gradient at each, against autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from onfoot.ops import Head, head_backward, head_forward
from onfoot.ops.attention import softmax_backward
from oracles import assert_close

T, D, D_RHO, D_H = 7, 6, 3, 4


def by_autograd(x: np.ndarray, head: Head, dy: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """Each row's value, and its gradient as PyTorch computes it; None where the table has no gradient of its own."""
    leaf = {name: torch.from_numpy(value).requires_grad_() for name, value in head._asdict().items()}
    inputs = {name: torch.from_numpy(x).clone().requires_grad_() for name in "qkv"}  # one input per branch
    rows = {name: inputs[name] @ leaf[f"w_{name}"] + leaf[f"b_{name}"] for name in "qkv"}
    rows["raw"] = rows["q"] @ rows["k"].T
    rows["scaled"] = rows["raw"] / math.sqrt(D_RHO)
    rows["causal"] = rows["scaled"].masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    rows["rho"] = rows["causal"].softmax(-1)
    rows["y"] = rows["rho"] @ rows["v"]
    for row in rows.values():
        row.retain_grad()
    rows["y"].backward(torch.from_numpy(dy))
    out = {name: (row.detach().numpy(), row.grad.numpy()) for name, row in rows.items()}
    return out | {f"Δ_{name}": (x, inputs[name].grad.numpy()) for name in "qkv"}


def by_the_table(x: np.ndarray, head: Head, dy: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    _, saved = head_forward(x, head)
    q, k, v, rho = saved.q, saved.k, saved.v, saved.rho
    raw = q @ k.T
    d_causal = softmax_backward(dy @ v.T, rho)
    d_raw = d_causal / math.sqrt(D_RHO)
    causal = np.where(np.tri(T, dtype=bool), raw / math.sqrt(D_RHO), -np.inf)
    return {
        "y": (rho @ v, dy),
        "rho": (rho, dy @ v.T),
        "causal": (causal, d_causal),
        "scaled": (raw / math.sqrt(D_RHO), d_causal),
        "raw": (raw, d_raw),
        "q": (q, d_raw @ k),
        "k": (k, d_raw.T @ q),
        "v": (v, rho.T @ dy),
        "Δ_q": (x, d_raw @ k @ head.w_q.T),
        "Δ_k": (x, d_raw.T @ q @ head.w_k.T),
        "Δ_v": (x, rho.T @ dy @ head.w_v.T),
    }


@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_table_1_is_autograds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(T, D)), rng.normal(size=(T, D_H))
    head = Head(*(rng.normal(size=shape) for shape in [(D, D_RHO), (D_RHO,)] * 2 + [(D, D_H), (D_H,)]))
    expected, got = by_autograd(x, head, dy), by_the_table(x, head, dy)
    assert expected.keys() == got.keys()
    for name, (value, gradient) in got.items():
        finite = np.isfinite(value)
        assert np.array_equal(finite, np.isfinite(expected[name][0])), name  # the mask's −∞ are the same
        assert_close(value[finite], expected[name][0][finite], 1e-13, name)
        assert_close(gradient, expected[name][1], 1e-12, f"gradient at {name}")
    dx, _ = head_backward(dy, head_forward(x, head)[1])
    assert_close(dx, sum(expected[f"Δ_{name}"][1] for name in "qkv"), 1e-12)  # eq 33
    shapes = {name: value.shape for name, (value, _) in got.items()}
    assert shapes["q"] == shapes["k"] == (T, D_RHO) and shapes["v"] == shapes["y"] == (T, D_H)
    assert {shapes[name] for name in ("raw", "scaled", "causal", "rho")} == {(T, T)}
    for name in ("rho", "causal"):
        assert not np.triu(got[name][1] if name == "causal" else got[name][0], 1).any()  # lower triangular
