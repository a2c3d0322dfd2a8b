"""The variables and gradients of docs/equations/shapes.md: each row of its tables against arrays and autograd."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from onfoot.ops import Head, attention_backward, attention_forward, head_backward, head_forward
from onfoot.ops.attention import attention_weights, softmax, softmax_backward
from oracles import assert_close

PAGE = Path(__file__).resolve().parents[2] / "docs" / "equations" / "shapes.md"
SIZES = {"n": 7, "d_model": 6, "d_k": 3, "d_v": 4}
NAMES = ["X", "WQ", "WK", "WV", "Q", "K", "V", "S", "A", "O"]


def rows_of_the_page() -> dict[str, tuple[int, ...]]:
    found = re.findall(r"^\| `(\w+)` \| \(([\w, ]+)\) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: tuple(SIZES[size] for size in shape.split(", ")) for name, shape in found}


def by_autograd() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All variables of one head in the note's letters, and the gradient at each."""
    rng = np.random.default_rng(0)
    n, d, dk, dv = SIZES.values()
    x = {
        k: torch.from_numpy(rng.normal(size=s))
        for k, s in zip(NAMES, [(n, d), (d, dk), (d, dk), (d, dv)], strict=False)
    }
    for leaf in x.values():
        leaf.requires_grad_()
    for one in "QKV":
        x[one] = x["X"] @ x[f"W{one}"]
    x["S"] = x["Q"] @ x["K"].T / math.sqrt(dk)
    x["A"] = x["S"].softmax(-1)
    x["O"] = x["A"] @ x["V"]
    for one in x.values():
        one.retain_grad()
    x["O"].backward(torch.from_numpy(rng.normal(size=(n, dv))))
    return {k: v.detach().numpy() for k, v in x.items()}, {f"d{k}": v.grad.numpy() for k, v in x.items()}


def test_every_variable_of_the_page_has_its_shape() -> None:
    values, gradients = by_autograd()
    rows = rows_of_the_page()
    assert sorted(rows) == sorted([*NAMES, *(f"d{name}" for name in NAMES)])
    assert rows == {name: value.shape for name, value in (values | gradients).items()}
    zero = np.zeros
    _, saved = head_forward(values["X"], Head(values["WQ"], zero(3), values["WK"], zero(3), values["WV"], zero(4)))
    assert [saved.q.shape, saved.k.shape, saved.v.shape, saved.rho.shape] == [rows[name] for name in "QKVA"]
    dx, grads = head_backward(gradients["dO"], saved)
    ours = [x.shape for x in (dx, grads.w_q, grads.w_k, grads.w_v)]
    assert ours == [rows[f"d{name}"] for name in NAMES[:4]]
    q, k, v = saved.q, saved.k, saved.v
    assert (attention_weights(q, k).shape, attention_forward(q, k, v)[0].shape) == (rows["S"], rows["O"])


def test_every_gradient_of_the_page_is_autograds() -> None:
    v, g = by_autograd()
    scale = math.sqrt(SIZES["d_k"])
    formulas = {
        "dA": g["dO"] @ v["V"].T,
        "dV": v["A"].T @ g["dO"],
        "dS": v["A"] * (g["dA"] - (v["A"] * g["dA"]).sum(axis=1, keepdims=True)),
        "dQ": g["dS"] @ v["K"] / scale,
        "dK": g["dS"].T @ v["Q"] / scale,
        "dWQ": v["X"].T @ g["dQ"],
        "dWK": v["X"].T @ g["dK"],
        "dWV": v["X"].T @ g["dV"],
        "dX": g["dQ"] @ v["WQ"].T + g["dK"] @ v["WK"].T + g["dV"] @ v["WV"].T,
    }
    for name, value in formulas.items():
        assert_close(value, g[name], 1e-13, name)
    y, saved_core = attention_forward(v["Q"], v["K"], v["V"], causal=False)
    assert_close(y, v["O"], 1e-13)
    for name, value in zip("QKV", attention_backward(g["dO"], saved_core), strict=True):
        assert_close(value, g[f"d{name}"], 1e-13, name)
    zero = np.zeros
    head = Head(v["WQ"], zero(3), v["WK"], zero(3), v["WV"], zero(4))
    y, saved = head_forward(v["X"], head, causal=False)
    assert_close(y, v["O"], 1e-13)
    dx, grads = head_backward(g["dO"], saved)
    for name, value in {"dX": dx, "dWQ": grads.w_q, "dWK": grads.w_k, "dWV": grads.w_v}.items():
        assert_close(value, g[name], 1e-12, name)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_jacobian_of_a_softmax_row_is_symmetric_and_its_rows_sum_to_zero(n: int) -> None:
    rng = np.random.default_rng(n)
    s, da = rng.normal(size=n), rng.normal(size=n)
    a = softmax(s)
    by_cases = np.array([[a[j] * (1 - a[j]) if j == k else -a[j] * a[k] for k in range(n)] for j in range(n)])
    expected = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), torch.from_numpy(s)).numpy()
    np.testing.assert_allclose(by_cases, expected, atol=1e-14)
    np.testing.assert_allclose(np.diag(a) - np.outer(a, a), expected, atol=1e-14)
    np.testing.assert_allclose(expected.sum(axis=0), 0, atol=1e-15)
    np.testing.assert_allclose(expected, expected.T, atol=1e-15)
    np.testing.assert_allclose(softmax_backward(da, a), da @ expected, atol=1e-14)
