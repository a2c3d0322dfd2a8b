"""The note with NumPy listings for self-attention, made to run: all three mistakes of its backward pass are found."""

from __future__ import annotations

import numpy as np
import pytest

from onfoot.check import attention, multi_head

Array = np.ndarray
LEARNING_RATE = 0.001
MEAN = "the mean in place of the weighted sum"
VALUES = "dv without the transpose of ρ"
UPDATE = "update before propagation"


class SelfAttention:
    """Realised anew: the layer keeps its weights and updates them inside its backward pass."""

    def __init__(self, w_q: Array, w_k: Array, w_v: Array, n_head: int) -> None:
        self.weights, self.n_head = [w_q, w_k, w_v], n_head

    def heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.n_head, -1).transpose(0, 2, 1, 3)

    def joined(self, x: Array) -> Array:
        return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    def forward(self, *inputs: Array) -> None:
        self.inputs = inputs
        self.q, self.k, self.v = (self.heads(x @ w) for x, w in zip(inputs, self.weights, strict=True))
        e = np.exp(self.q @ self.k.transpose(0, 1, 3, 2) / np.sqrt(self.q.shape[-1]))
        self.a = e / e.sum(axis=-1, keepdims=True)

    def backward(self, dout: Array, right: frozenset[str] = frozenset()) -> tuple[Array, ...]:
        do = self.heads(dout)
        da = do @ self.v.transpose(0, 1, 3, 2)
        dv = self.a.transpose(0, 1, 3, 2) @ do if VALUES in right else self.a.transpose(0, 1, 2, 3) @ do
        ds = da * self.a
        if MEAN in right:
            ds -= self.a * ds.sum(axis=-1, keepdims=True)
        else:
            ds -= np.mean(ds, axis=-1, keepdims=True)
        ds /= np.sqrt(self.q.shape[-1])
        grads = [self.joined(d) for d in (ds @ self.k, ds.transpose(0, 1, 3, 2) @ self.q, dv)]
        dweights = [np.einsum("bti,btj->ij", x, d) for x, d in zip(self.inputs, grads, strict=True)]
        if UPDATE not in right:
            self.weights = [w - LEARNING_RATE * dw for w, dw in zip(self.weights, dweights, strict=True)]
        return (*(d @ w.T for d, w in zip(grads, self.weights, strict=True)), *dweights)


def listing(query, key, value, w_q, w_k, w_v, dout, n_head=2):
    layer = SelfAttention(w_q, w_k, w_v, n_head)
    layer.forward(query, key, value)
    return layer.backward(dout)


@pytest.mark.parametrize("n_head", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_three_mistakes_of_one_function_are_named_with_the_learning_rate(n_head: int, fresh: int) -> None:
    report = multi_head(listing, causal=False, n_head=n_head, seed=fresh)
    found = report.diagnosis
    assert report.wrong == ["dquery", "dkey", "dvalue", "dw_q", "dw_k", "dw_v"]
    assert found is not None and found.complete
    assert {f.name for f in found.findings} == {MEAN, VALUES, UPDATE}
    assert found.residual < 1e-12
    by_name = {f.name: f for f in found.findings}
    assert by_name[MEAN].gradients == ["dquery", "dkey", "dw_q", "dw_k"]
    assert by_name[VALUES].gradients == ["dvalue", "dw_v"]
    assert by_name[UPDATE].gradients == ["dquery", "dkey", "dvalue"]
    assert by_name[UPDATE].value == "learning rate = 0.001"


@pytest.mark.slow
def test_mended_one_after_the_other_the_listing_passes() -> None:
    mended: frozenset[str] = frozenset()

    def backward(query, key, value, w_q, w_k, w_v, dout, n_head=2):
        layer = SelfAttention(w_q, w_k, w_v, n_head)
        layer.forward(query, key, value)
        return layer.backward(dout, mended)

    left = {MEAN, VALUES, UPDATE}
    for _ in range(3):
        found = multi_head(backward, causal=False, seed=8).diagnosis
        assert found is not None
        assert {f.name for f in found.findings} == left
        mended |= {found.findings[0].name}
        left -= mended
    assert multi_head(backward, causal=False, seed=8).passed


def test_an_update_in_place_is_reported_as_such() -> None:
    def backward(query, key, value, w_q, w_k, w_v, dout, n_head=2):
        layer = SelfAttention(w_q, w_k, w_v, n_head)
        layer.forward(query, key, value)
        found = layer.backward(dout)
        for w, updated in zip((w_q, w_k, w_v), layer.weights, strict=True):
            w[:] = updated
        return found

    report = multi_head(backward, causal=False, seed=4)
    assert "mutates: it modifies its argument w_q in place" in str(report)
    assert report.diagnosis is not None
    assert {f.name for f in report.diagnosis.findings} == {MEAN, VALUES, UPDATE}


def test_the_core_alone_shows_two_of_them() -> None:
    def backward(q, k, v, dout):
        e = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
        a = e / e.sum(axis=-1, keepdims=True)
        ds = dout @ v.transpose(0, 1, 3, 2) * a
        ds = (ds - np.mean(ds, axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return ds @ k, ds.transpose(0, 1, 3, 2) @ q, a.transpose(0, 1, 2, 3) @ dout

    found = attention(backward, causal=False, seed=12).diagnosis
    assert found is not None
    assert {f.name for f in found.findings} >= {MEAN, VALUES}
