"""Layer norm and RMS norm, token by token and feature by feature or by autograd of a wrong forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from planted.registry import autograd, plant, plant_change

Array = np.ndarray


def layer_norm(x: Array, weight: Array, bias: Array, dout: Array, **changes: Any) -> tuple[Array, Array, Array]:
    """Sums ∂y_j/∂x_k per token; `changes` makes a part of it wrong."""
    eps, d = 1e-5, x.shape[-1]
    ddof, outside, inside = changes.get("ddof", 0), changes.get("outside", 0.0), changes.get("inside", eps)
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(weight), np.zeros_like(bias)
    with np.errstate(all="ignore"):
        sigma = np.sqrt(x.var(axis=-1, ddof=ddof) + inside) + outside  # (B, T)
        normed = (x - x.mean(axis=-1)[..., None]) / sigma[..., None]
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                z = normed[b, t]
                inner, outer = (dout[b, t] * weight, 1.0)
                if changes.get("gamma") == "outside":
                    inner, outer = dout[b, t], weight
                if changes.get("gamma") == "missing":
                    inner, outer = dout[b, t], 1.0
                jacobian = np.eye(d)
                if not changes.get("mean_constant"):
                    jacobian = jacobian - changes.get("share", 1 / d)
                if not changes.get("variance_constant"):
                    jacobian = jacobian - np.outer(z, z) * changes.get("share", 1 / d)
                dx[b, t] = outer * (jacobian @ inner) / sigma[b, t] ** changes.get("power", 1)
                dweight += dout[b, t] * (x[b, t] if changes.get("raw") else z)
                dbias += dout[b, t]
    return dx, dweight, dbias


def layer_norm_with(name: str, /, **changes: Any) -> None:
    plant_change("layer_norm", name, layer_norm, **changes)


layer_norm_with("γ outside the means", gamma="outside")
layer_norm_with("γ missing from dx", gamma="missing")
layer_norm_with("eps outside the root", inside=0.0, outside=1e-5)
layer_norm_with("no eps", inside=0.0)
layer_norm_with("unbiased variance", ddof=1)
layer_norm_with("sums in place of means in dx", share=1)
layer_norm_with("the mean held constant", mean_constant=True)
layer_norm_with("the variance held constant", variance_constant=True)
layer_norm_with("mean and variance held constant", mean_constant=True, variance_constant=True)
layer_norm_with("1/σ missing from dx", power=0)
layer_norm_with("the variance in place of σ in dx", power=2)
layer_norm_with("dweight from x in place of ā", raw=True)


def normalised(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / sigma


@plant("layer_norm", "eps outside the root, in both passes")
def late_eps(x, weight, bias, dout):
    def forward(x, w, b):
        return normalised(x, x.std(-1, correction=0, keepdim=True) + 1e-5) * w + b

    return autograd(forward, [x, weight, bias], dout)


@plant("layer_norm", "unbiased variance, in both passes")
def unbiased(x, weight, bias, dout):
    def forward(x, w, b):
        return normalised(x, (x.var(-1, correction=1, keepdim=True) + 1e-5).sqrt()) * w + b

    return autograd(forward, [x, weight, bias], dout)


@plant("layer_norm", "the means in dx over tokens")
def batch_norm_sums(x, weight, bias, dout):
    rstd = torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
    z = (x - x.mean(-1, keepdim=True)) * rstd
    g = dout * weight
    dx = rstd * (g - g.mean(1, keepdim=True) - z * (g * z).mean(1, keepdim=True))
    return dx, (dout * z).sum((0, 1)), dout.sum((0, 1))


@plant("layer_norm", "dweight as a diagonal matrix")
def diagonal(x, weight, bias, dout):
    dx, dweight, dbias = layer_norm(x, weight, bias, dout)
    return dx, dweight * np.eye(len(weight)), dbias


@plant("layer_norm", "dweight and dbias of a single sequence")
def one_sequence(x, weight, bias, dout):
    dx, _, _ = layer_norm(x, weight, bias, dout)
    _, dweight, dbias = layer_norm(x[-1:], weight, bias, dout[-1:])
    return dx, dweight, dbias


# RMS norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor, **changes: Any) -> tuple[torch.Tensor, ...]:
    eps = 1e-6
    if changes.get("centre"):
        x = x - x.mean(-1, keepdim=True)
    r = (x.pow(2).mean(-1, keepdim=True) + changes.get("inside", eps)).sqrt() + changes.get("outside", 0.0)
    g = dout * weight if "gamma" not in changes else dout
    over = changes.get("axis", -1)
    share = (g * x / r).sum(over, keepdim=True) / (1 if changes.get("sum") else x.shape[over])
    along = x / r * share if not changes.get("raw_x") else x * share
    if changes.get("constant"):
        along = 0
    if changes.get("layer_norm"):
        along = along + g.mean(-1, keepdim=True)
    dx = (g - along) / r ** changes.get("power", 1)
    if changes.get("gamma") == "outside":
        dx = dx * weight
    return dx, torch.einsum("btc,btc->c", dout, x if changes.get("raw_weight") else x / r)


def rms_norm_with(name: str, /, **changes: Any) -> None:
    plant_change("rms_norm", name, rms_norm, **changes)


rms_norm_with("γ outside the mean", gamma="outside")
rms_norm_with("γ missing from dx", gamma="missing")
rms_norm_with("the root mean square held constant", constant=True)
rms_norm_with("layer norm's mean subtracted", layer_norm=True)
rms_norm_with("features centred first", centre=True)
rms_norm_with("eps outside the root", inside=0.0, outside=1e-6)
rms_norm_with("no eps", inside=0.0)
rms_norm_with("a sum in place of the mean in dx", sum=True)
rms_norm_with("x in place of x̂ in dx", raw_x=True)
rms_norm_with("the mean over tokens", axis=1)
rms_norm_with("1/rms missing from dx", power=0)
rms_norm_with("the mean of squares in place of rms in dx", power=2)
rms_norm_with("dweight from x in place of x̂", raw_weight=True)


@plant("rms_norm", "eps outside the root, in both passes")
def rms_late_eps(x, weight, dout):
    return autograd(lambda x, w: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w, [x, weight], dout)
