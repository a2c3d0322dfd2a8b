"""ReLU and both GELUs, one pass over memory each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F, erf, exp
from onfoot.kernels.jit import Kernel, inner, kernel
from onfoot.kernels.shapes import contiguous, fall_back_to_formula, is_float32, thread_range
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI

GRAIN = 1024  # elements
TWO_ROOT = F(2 * ROOT_2_OVER_PI)
CUBE = F(CUBIC)
ROOT_HALF = F(np.sqrt(0.5))
DENSITY = F(1 / np.sqrt(2 * np.pi))


class ActivationKernelSaved(NamedTuple):
    x: np.ndarray


@inner
def gelu_tanh(x: float) -> float:
    """x σ(2u) with u = √(2/π)(x + 0.044715 x³): (1 + tanh u)/2 is the logistic function of 2u."""
    return x / (F(1) + exp(-TWO_ROOT * (x + CUBE * (x * x * x))))  # eq G.3


@inner
def gelu_tanh_slope(x: float) -> float:
    """σ + x σ(1 − σ) 2u'."""
    return gelu_tanh_and_slope(x)[1]  # eq G.4


@inner
def gelu_tanh_and_slope(x: float) -> tuple[float, float]:
    """Both, with one exponential and one division."""
    x2 = x * x
    s = F(1) / (F(1) + exp(-TWO_ROOT * (x + CUBE * (x2 * x))))
    return x * s, s + x * s * (F(1) - s) * (TWO_ROOT * (F(1) + F(3) * CUBE * x2))  # eq G.3, G.4


@inner
def gelu_erf(x: float) -> float:
    """x Φ(x)."""
    return F(0.5) * x * (F(1) + erf(x * ROOT_HALF))  # eq G.5


@inner
def gelu_erf_slope(x: float) -> float:
    """Φ(x) + x φ(x)."""
    return F(0.5) * (F(1) + erf(x * ROOT_HALF)) + x * DENSITY * exp(F(-0.5) * x * x)  # eq G.6


@inner
def relu(x: float) -> float:
    """max(x, 0); NaN stays NaN."""
    return F(0) if x <= F(0) else x  # eq G.1


@inner
def relu_slope(x: float) -> float:
    """1 where x > 0."""
    return F(0) if x <= F(0) else F(1)  # eq G.2


def _pair(name: str, function: Any, slope: Any) -> tuple[Kernel, Kernel]:
    """The kernels of one activation."""

    @kernel("f4[::1], f4[::1]", "n, n", f"{name}_forward")
    def forward(x: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
        a, e = thread_range(x.size, GRAIN, thread, threads)
        part_x, part_y = x[a:e], y[a:e]
        for i in range(e - a):
            part_y[i] = function(part_x[i])

    @kernel("f4[::1], f4[::1], f4[::1]", "n, n, n", f"{name}_backward")
    def backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray, thread: int, threads: int) -> None:
        a, e = thread_range(x.size, GRAIN, thread, threads)
        part_dy, part_x, part_dx = dy[a:e], x[a:e], dx[a:e]
        for i in range(e - a):
            part_dx[i] = part_dy[i] * slope(part_x[i])

    return forward, backward


_KERNELS = {
    "gelu_tanh": _pair("gelu_tanh", gelu_tanh, gelu_tanh_slope),
    "gelu_erf": _pair("gelu_erf", gelu_erf, gelu_erf_slope),
    "relu": _pair("relu", relu, relu_slope),
}


KERNELS = tuple(one for pair in _KERNELS.values() for one in pair)


def _forward(name: str, x: np.ndarray) -> tuple[np.ndarray, ActivationKernelSaved]:
    x = contiguous(x)
    y = empty(x.shape)
    _KERNELS[name][0](x.reshape(-1), y.reshape(-1))
    return y, ActivationKernelSaved(x)


def _backward(name: str, dy: np.ndarray, saved: ActivationKernelSaved) -> np.ndarray:
    if not is_float32(dy, saved.x) or dy.shape != saved.x.shape:
        return fall_back_to_formula(getattr(ops, f"{name}_backward"), dy, saved)
    dx = empty(dy.shape)
    _KERNELS[name][1](contiguous(dy).reshape(-1), saved.x.reshape(-1), dx.reshape(-1))
    return dx


def gelu_tanh_forward(x: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = x/2 (1 + tanh u)."""
    return _forward("gelu_tanh", x) if is_float32(x) else ops.gelu_tanh_forward(x)


def gelu_tanh_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """dx = dy ∘ [ (1 + tanh u)/2 + x/2 (1 − tanh² u) u' ]."""
    return _backward("gelu_tanh", dy, saved)


def gelu_erf_forward(x: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = x Φ(x)."""
    return _forward("gelu_erf", x) if is_float32(x) else ops.gelu_erf_forward(x)


def gelu_erf_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """dx = dy ∘ [ Φ(x) + x φ(x) ]."""
    return _backward("gelu_erf", dy, saved)


def relu_forward(x: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = max(x, 0)."""
    return _forward("relu", x) if is_float32(x) else ops.relu_forward(x)


def relu_backward(dy: np.ndarray, saved: Any) -> np.ndarray:
    """dx = dy where x > 0."""
    return _backward("relu", dy, saved)
