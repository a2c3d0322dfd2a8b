"""The tangents of the activations and of SwiGLU, one pass over memory each."""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.kernels import activation, swiglu
from onfoot.kernels.activation import CUBE, DENSITY, TWO_ROOT, gelu_erf_slope, gelu_tanh_slope
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import inner, kernel
from onfoot.kernels.shapes import contiguous, is_float32, thread_range
from onfoot.kernels.swiglu import SwiGLUKernelSaved
from onfoot.ops import tangents as formulas

GRAIN = 1024  # elements


@inner
def gelu_tanh_curvature(x: float) -> float:
    """g'' with the logistic function s of 2u: 2 s(1 − s) 2u' + x [s(1 − s)(1 − 2s)(2u')² + s(1 − s) 2u'']."""
    x2 = x * x
    s = F(1) / (F(1) + exp(-TWO_ROOT * (x + CUBE * (x2 * x))))
    slope, bend = TWO_ROOT * (F(1) + F(3) * CUBE * x2), TWO_ROOT * (F(6) * CUBE * x)
    return s * (F(1) - s) * (F(2) * slope + x * ((F(1) - F(2) * s) * slope * slope + bend))  # eq G.9


@inner
def gelu_erf_curvature(x: float) -> float:
    """φ(x) (2 − x²)."""
    return DENSITY * exp(F(-0.5) * x * x) * (F(2) - x * x)  # eq G.10


def _curved(name: str, slope: Any, curvature: Any) -> Any:
    @kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n", f"{name}_backward")
    def backward(
        dy: np.ndarray, dy_dot: np.ndarray, x: np.ndarray, x_dot: np.ndarray, out: np.ndarray, thread: int, threads: int
    ) -> None:
        a, e = thread_range(x.size, GRAIN, thread, threads)
        d, d_dot, here, moved, to = dy[a:e], dy_dot[a:e], x[a:e], x_dot[a:e], out[a:e]
        for i in range(e - a):
            to[i] = d_dot[i] * slope(here[i]) + d[i] * curvature(here[i]) * moved[i]  # eq G.8

    return backward


_gelu_tanh = _curved("gelu_tanh", gelu_tanh_slope, gelu_tanh_curvature)
_gelu_erf = _curved("gelu_erf", gelu_erf_slope, gelu_erf_curvature)


def gelu_tanh_tangent(x_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = g'(x) ∘ ẋ."""
    return activation.gelu_tanh_backward(x_dot, saved), x_dot  # eq G.7


def gelu_erf_tangent(x_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = g'(x) ∘ ẋ."""
    return activation.gelu_erf_backward(x_dot, saved), x_dot  # eq G.7


def relu_tangent(x_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ = ẋ where x > 0."""
    return activation.relu_backward(x_dot, saved), x_dot  # eq G.7


def _activation_backward_tangent(kernel: Any, dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    out = empty(dy.shape)
    kernel(*(contiguous(a).reshape(-1) for a in (dy, dy_dot, saved.x, x_dot)), out.reshape(-1))
    return out


def gelu_tanh_backward_tangent(dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    """The tangent of the gradient of x."""
    if not is_float32(dy, dy_dot, saved.x, x_dot):
        return formulas.gelu_tanh_backward_tangent(dy, dy_dot, saved, type(saved)(x_dot))
    return _activation_backward_tangent(_gelu_tanh, dy, dy_dot, saved, x_dot)


def gelu_erf_backward_tangent(dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    """The tangent of the gradient of x."""
    if not is_float32(dy, dy_dot, saved.x, x_dot):
        return formulas.gelu_erf_backward_tangent(dy, dy_dot, saved, type(saved)(x_dot))
    return _activation_backward_tangent(_gelu_erf, dy, dy_dot, saved, x_dot)


def relu_backward_tangent(dy: Any, dy_dot: Any, saved: Any, x_dot: Any) -> Any:
    """The tangent of the gradient of x: no curvature."""
    return activation.relu_backward(dy_dot, saved)


@kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n")
def _swiglu_tangent(
    gate: np.ndarray,
    up: np.ndarray,
    gate_dot: np.ndarray,
    up_dot: np.ndarray,
    out: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(gate.size, GRAIN, thread, threads)
    g, u, gd, ud, to = gate[a:e], up[a:e], gate_dot[a:e], up_dot[a:e], out[a:e]
    for i in range(e - a):
        s = F(1) / (F(1) + exp(-g[i]))
        silu = g[i] * s
        to[i] = (s + silu * (F(1) - s)) * gd[i] * u[i] + silu * ud[i]  # eq GLU.4


@kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n, n, n, n")
def _swiglu_backward_tangent(
    dy: np.ndarray,
    dy_dot: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    gate_dot: np.ndarray,
    up_dot: np.ndarray,
    dgate_dot: np.ndarray,
    dup_dot: np.ndarray,
    thread: int,
    threads: int,
) -> None:
    a, e = thread_range(gate.size, GRAIN, thread, threads)
    d, dd, g, u, gd, ud = dy[a:e], dy_dot[a:e], gate[a:e], up[a:e], gate_dot[a:e], up_dot[a:e]
    out_g, out_u = dgate_dot[a:e], dup_dot[a:e]
    for i in range(e - a):
        s = F(1) / (F(1) + exp(-g[i]))
        silu = g[i] * s
        slope = s + silu * (F(1) - s)
        curvature = s * (F(1) - s) * (F(2) + g[i] * (F(1) - F(2) * s))  # eq GLU.7
        out_g[i] = (dd[i] * u[i] + d[i] * ud[i]) * slope + d[i] * u[i] * curvature * gd[i]  # eq GLU.5
        out_u[i] = dd[i] * silu + d[i] * slope * gd[i]  # eq GLU.6


def swiglu_tangent(gate_dot: Any, up_dot: Any, saved: Any) -> tuple[Any, Any]:
    """ẏ of SwiGLU."""
    if not isinstance(saved, SwiGLUKernelSaved):
        return formulas.swiglu_tangent(gate_dot, up_dot, saved)
    gate_dot, up_dot = contiguous(gate_dot), contiguous(up_dot)
    out = empty(gate_dot.shape)
    _swiglu_tangent(*(a.reshape(-1) for a in (saved.gate, saved.up, gate_dot, up_dot, out)))
    return out, SwiGLUKernelSaved(gate_dot, up_dot)


def swiglu_backward_tangent(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> tuple[Any, Any]:
    """Tangents of the gradients of gate and up."""
    if not isinstance(saved, SwiGLUKernelSaved):
        return formulas.swiglu_backward_tangent(dy, dy_dot, saved, saved_dot)
    dgate_dot, dup_dot = empty(dy.shape), empty(dy.shape)
    arrays = contiguous(dy), contiguous(dy_dot), *saved, *saved_dot, dgate_dot, dup_dot
    _swiglu_backward_tangent(*(a.reshape(-1) for a in arrays))
    return dgate_dot, dup_dot


KERNELS = (*activation.KERNELS, *swiglu.KERNELS, _gelu_tanh, _gelu_erf, _swiglu_tangent, _swiglu_backward_tangent)
