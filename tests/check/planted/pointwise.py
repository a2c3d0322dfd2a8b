"""GELU, SwiGLU, rotary embeddings and AdamW, number by number."""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from planted.registry import autograd, plant

Array = np.ndarray


# GELU


@plant("gelu", "tanh-GELU with erf's derivative")
def erf_derivative(x, dout):
    return autograd(F.gelu, [x], dout)[0]


@plant("gelu", "erf-GELU with tanh's derivative", form="erf")
def tanh_derivative(x, dout):
    return autograd(lambda x: F.gelu(x, approximate="tanh"), [x], dout)[0]


def gelu_by(name: str, /, **changes: Any) -> None:
    @plant("gelu", name)
    def backward(x: Array, dout: Array) -> Array:
        out = np.zeros_like(x)
        for i in np.ndindex(x.shape):
            u = math.sqrt(2 / math.pi) * (x[i] + 0.044715 * x[i] ** 3)
            tanh = math.tanh(u)
            slope = changes.get("bend", lambda t: 1 - t * t)(tanh)
            inner = changes.get("inner", lambda z: math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z))(x[i])
            out[i] = dout[i] * ((1 + tanh) / 2 + changes.get("second", 1) * x[i] / 2 * slope * inner)
        return out


gelu_by("x φ(x) missing", second=0)
gelu_by("the inner derivative of tanh missing", inner=lambda z: 1)
gelu_by("the factor 3 of the derivative of x³ missing", inner=lambda z: math.sqrt(2 / math.pi) * (1 + 0.044715 * z * z))
gelu_by("tanh in place of its square", bend=lambda t: 1 - t)


@plant("gelu", "the function in place of its derivative")
def no_derivative(x, dout):
    return dout * F.gelu(x, approximate="tanh")


@plant("gelu", "the derivative of the sigmoid form")
def sigmoid_form(x, dout):
    return autograd(lambda x: x * torch.sigmoid(1.702 * x), [x], dout)[0]


# SwiGLU


def swiglu_by(name: str, /, slope=None, dgate=None, dup=None) -> None:
    @plant("swiglu", name)
    def backward(gate: torch.Tensor, up: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        right_dgate, right_dup = autograd(lambda g, u: F.silu(g) * u, [gate, up], dout)
        if slope is not None:
            right_dgate = dout * up * slope(gate)
        return dgate(gate, up, dout) if dgate else right_dgate, dup(gate, dout) if dup else right_dup


def silu_derivative(x: torch.Tensor) -> torch.Tensor:
    return autograd(F.silu, [x], torch.ones_like(x))[0]


swiglu_by("σ in place of silu's derivative", slope=torch.sigmoid)
swiglu_by("σ' in place of silu's derivative", slope=lambda g: torch.sigmoid(g) * torch.sigmoid(-g))
swiglu_by("the first term of silu's derivative missing", slope=lambda g: silu_derivative(g) - torch.sigmoid(g))
swiglu_by("silu' evaluated at silu(x)", slope=lambda g: silu_derivative(F.silu(g)))
swiglu_by("up missing from dgate", dgate=lambda g, u, d: d * silu_derivative(g))
swiglu_by("gate in place of silu(gate) in dup", dup=lambda g, d: d * g)
swiglu_by("σ(gate) in place of silu(gate) in dup", dup=lambda g, d: d / (1 + torch.exp(-g)))


# rotary positions


def rope_by(name: str, /, **changes: Any) -> None:
    @plant("rope", name)
    def backward(x: Array, positions: Array, dout: Array) -> Array:
        out, half, width = np.zeros_like(dout), x.shape[-1] // 2, x.shape[-1]
        pair = changes.get("pair", lambda i, half: (i, i + half))
        for t in range(len(positions)):
            place = changes.get("place", lambda t, p: int(p[t]))(t, positions)
            for i in range(half):
                a, b = pair(i, half)
                angle = place * 10000.0 ** (-changes.get("power", 2) * i / width)
                turned = (dout[:, :, t, a] + 1j * dout[:, :, t, b]) * cmath.exp(changes.get("sign", -1) * 1j * angle)
                out[:, :, t, a], out[:, :, t, b] = turned.real, turned.imag
        return out


rope_by("rotated forward again", sign=1)
rope_by("the rotation left out", sign=0)
rope_by("adjacent features as pairs", pair=lambda i, half: (2 * i, 2 * i + 1))
rope_by("positions counted from 1", place=lambda t, p: int(p[t]) + 1)
rope_by("positions not used", place=lambda t, p: t)
rope_by("θ^(−i/D) in place of θ^(−2i/D)", power=1)


@plant("rope", "the second half with the wrong sign")
def mirrored(x, positions, dout):
    half = x.shape[-1] // 2
    angle = torch.outer(positions.double(), 10000.0 ** (-torch.arange(half).double() / half)).to(x.dtype)
    first, second = dout[..., :half], dout[..., half:]
    return torch.cat([first * angle.cos() + second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


# AdamW


def adamw_by(name: str, /, **changes: Any) -> None:
    @plant("adamw", name)
    def update(param: Array, grad: Array, m: Array, v: Array, step: int) -> tuple[Array, Array, Array]:
        lr, b1, b2, decay = 1e-2, 0.9, 0.95, 0.1
        out = [np.zeros_like(param) for _ in range(3)]
        t = step + changes.get("late", 0)
        for i in np.ndindex(param.shape):
            g = grad[i] + (decay * param[i] if changes.get("l2") else 0)
            one = b1 * m[i] + (1 - b1) * g
            two = b2 * v[i] + (1 - (b1 if changes.get("mixed") else b2)) * g * g
            m_hat, v_hat = one / (1 - b1**t), two / (1 - (b1 if changes.get("mixed_correction") else b2) ** t)
            if changes.get("uncorrected"):
                m_hat, v_hat = one, two
            below = changes.get("below", lambda v: math.sqrt(v) + 1e-8)(v_hat)
            kept = param[i] * (1 - changes.get("decay", lr * decay))
            moved = (kept + changes.get("sign", -1) * lr * m_hat / below) * (
                1 - lr * decay if changes.get("shrink") else 1
            )
            out[0][i], out[1][i], out[2][i] = moved, one, two
        return out[0], out[1], out[2]


adamw_by("1 − β₁ in the second moment", mixed=True)
adamw_by("no bias correction", uncorrected=True)
adamw_by("β₁ in the bias correction of the second moment", mixed_correction=True)
adamw_by("steps counted from 0", late=1)
adamw_by("eps inside the square root", below=lambda v: math.sqrt(v + 1e-8))
adamw_by("the step is added in place of subtracted", sign=1)
adamw_by("the square root missing", below=lambda v: v + 1e-8)
adamw_by("weight decay added to the gradient", l2=True, decay=0)
adamw_by("no weight decay", decay=0)
adamw_by("weight decay after the step", decay=0, shrink=True)
adamw_by("weight decay without the learning rate", decay=0.1)
