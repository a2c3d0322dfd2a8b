"""A function that computes in float32 inside is judged in float32: right ones pass, mistakes in them are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.report import LayerReport

SINGLE = np.float32


def check(layer: str, held: Any, **options: Any) -> LayerReport:
    return check_layer(LAYERS[layer], held, **options)


def linear(db: Callable[[Any], Any], narrow: bool = False) -> Callable[..., Any]:
    def backward(x, weight, bias, dout):
        x, weight, dout = (np.asarray(a, SINGLE) for a in (x, weight, dout))
        found = dout @ weight.T, np.einsum("bti,bto->io", x, dout), db(dout)
        return tuple(g.astype(SINGLE if narrow else bias.dtype) for g in found)

    return backward


def attention(scale: bool) -> Callable[..., Any]:
    def backward(q, k, v, dout):
        dtype = q.dtype
        q, k, v, dout = (np.asarray(a, SINGLE) for a in (q, k, v, dout))
        root = SINGLE(np.sqrt(q.shape[-1]))
        s = np.where(np.tri(q.shape[-2], k.shape[-2]) > 0, q @ k.swapaxes(-1, -2) / root, SINGLE(-np.inf))
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dp = dout @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / (root if scale else 1)
        found = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
        return tuple(g.astype(dtype) for g in found)

    return backward


def gelu(three: float) -> Callable[..., Any]:
    def backward(x, dout):
        dtype, c, k = x.dtype, SINGLE(np.sqrt(2 / np.pi)), SINGLE(0.044715)
        x, dout = np.asarray(x, SINGLE), np.asarray(dout, SINGLE)
        t = np.tanh(c * (x + k * x**3))
        slope = (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + SINGLE(three) * k * x * x)
        return (dout * slope).astype(dtype)

    return backward


def norm_function(correct: bool) -> type[torch.autograd.Function]:
    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, r)
            return (x.float() * r).to(x.dtype) * weight

        @staticmethod
        def backward(ctx, dy):
            x, weight, r = ctx.saved_tensors
            h, g = x.float() * r, dy.float() * weight.float()
            dx = r * (g - h * (g * h).mean(-1, keepdim=True)) if correct else r * g
            return dx.to(x.dtype), (dy.float() * h).sum((0, 1)).to(weight.dtype)

    return RMSNorm


def norm_module(one: float) -> type[torch.nn.Module]:
    class GemmaNorm(torch.nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(dim))

        def forward(self, x):
            n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            return (n * (one + self.weight.float())).type_as(x)

    return GemmaNorm


def linear_class(db: Callable[[Any], Any]) -> type:
    class Linear:
        def __init__(self, weight, bias):
            self.weight, self.bias = weight.astype(SINGLE), bias

        def forward(self, x):
            self.x = x.astype(SINGLE)
            return self.x @ self.weight + self.bias

        def backward(self, dout):
            self.dweight, self.dbias = np.einsum("bti,bto->io", self.x, dout.astype(SINGLE)), db(dout.astype(SINGLE))
            return dout.astype(SINGLE) @ self.weight.T

    return Linear


def linear_pair(db: Callable[[Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x, weight, bias):
        return x @ weight + bias, (x, weight, bias)

    return forward, lambda dout, saved: linear(db)(*saved, dout)


def total(dout: Any) -> Any:
    return dout.sum((0, 1))


def mean(dout: Any) -> Any:
    return dout.mean((0, 1))


MEAN = "dbias is B·n"
FORMS = {  # form -> layer, a right one, a wrong one, what it is called
    "a function": ("linear", linear(total), linear(mean), MEAN),
    "a function that returns float32": ("linear", linear(total, True), linear(mean, True), MEAN),
    "attention": ("attention", attention(True), attention(False), "1/√d_k missing"),
    "one gradient": ("gelu", gelu(3), gelu(1), "the factor 3 of the derivative of x³ missing"),
    "an autograd.Function": ("rms_norm", norm_function(True), norm_function(False), "the root mean square held"),
    "an nn.Module": ("rms_norm", norm_module(0.0), norm_module(1.0), "1 + weight in place of weight"),
    "a class": ("linear", linear_class(total), linear_class(mean), MEAN),
    "a pair": ("linear", linear_pair(total), linear_pair(mean), MEAN),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_function_passes_and_a_mistake_is_named_in_float32(form: str) -> None:
    layer, right, wrong, name = FORMS[form]
    report = check(layer, right)
    assert report.passed, str(report)
    assert any("only as accurate as float32 and was judged as such: a step computes" in w for w in report.warnings)
    report = check(layer, wrong)
    assert report.diagnosis is not None and report.diagnosis.complete, str(report)
    assert [f.name.startswith(name) for f in report.diagnosis.findings] == [True]


def test_only_the_gradients_that_are_wrong_in_float32_are_listed() -> None:
    report = check("linear", linear(mean))
    assert report.wrong == ["dbias"]
    assert any(w.startswith("float64 of dx, dweight is only as accurate as float32") for w in report.warnings)
    alone = check("linear", linear(mean), dtypes=["float64"])
    assert alone.wrong == ["dbias"] and alone.verdict == report.verdict


def test_the_gradients_that_are_exact_keep_the_tolerance_of_float64() -> None:
    def backward(x, weight, bias, dout):
        single = (dout.astype(np.float32) @ weight.T.astype(np.float32)).astype(dout.dtype)
        return single, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))

    report = check("linear", backward)
    assert report.passed, str(report)
    exact = [m for o in report.outcomes if o.dtype == "float64" for m in o.measured]
    allowed = {name: [m.allowed for m in exact if m.gradient == name] for name in ("dx", "dweight", "dbias")}
    assert min(allowed["dx"]) > 1e-7 and max(allowed["dweight"] + allowed["dbias"]) < 1e-8


def test_an_error_that_is_larger_than_float32s_is_still_found() -> None:
    def slightly(x, dout):
        return gelu(3)(x, dout) * (1 + 1e-4)

    assert check("gelu", slightly).wrong == ["dx"]


def test_a_mistake_that_shows_in_16_bits_is_named_in_float32_too() -> None:
    def backward(x, weight, bias, dout):
        x, weight, dout = x.float(), weight.float(), dout.float()
        found = dout @ weight.T, torch.einsum("bti,bto->io", x, dout), dout.mean((0, 1))
        return tuple(g.to(bias.dtype) for g in found)

    assert check("linear", backward, dtypes=["bfloat16"], tokens=5, width=6).verdict.startswith(f"wrong: dbias; {MEAN}")


def test_a_gradient_with_few_digits_is_not_taken_for_float32() -> None:
    def backward(x, weight, bias, dout):
        return np.full(x.shape, 0.5), np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))

    report = check("linear", backward)
    assert report.wrong == ["dx"]
    assert not any("float32" in w for w in report.warnings)
