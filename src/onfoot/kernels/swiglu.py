"""SwiGLU, one pass over memory each way."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onfoot import ops
from onfoot.kernels.buffers import empty
from onfoot.kernels.elementary import F, exp
from onfoot.kernels.jit import kernel
from onfoot.kernels.shapes import contiguous, fall_back_to_formula, is_float32, thread_range

GRAIN = 1024  # elements


class SwiGLUKernelSaved(NamedTuple):
    gate: np.ndarray
    up: np.ndarray


@kernel("f4[::1], f4[::1], f4[::1]", "n, n, n")
def _forward(gate: np.ndarray, up: np.ndarray, y: np.ndarray, thread: int, threads: int) -> None:
    a, e = thread_range(gate.size, GRAIN, thread, threads)
    g, u, out = gate[a:e], up[a:e], y[a:e]
    for i in range(e - a):
        out[i] = g[i] / (F(1) + exp(-g[i])) * u[i]  # eq GLU.1


@kernel("f4[::1], f4[::1], f4[::1], f4[::1], f4[::1]", "n, n, n, n, n")
def _backward(
    dy: np.ndarray, gate: np.ndarray, up: np.ndarray, dgate: np.ndarray, dup: np.ndarray, thread: int, threads: int
) -> None:
    a, e = thread_range(gate.size, GRAIN, thread, threads)
    d, g, u, out_g, out_u = dy[a:e], gate[a:e], up[a:e], dgate[a:e], dup[a:e]
    for i in range(e - a):
        s = F(1) / (F(1) + exp(-g[i]))
        silu = g[i] * s
        out_g[i] = d[i] * u[i] * (s + silu * (F(1) - s))  # eq GLU.2
        out_u[i] = d[i] * silu  # eq GLU.3


def swiglu_forward(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, Any]:
    """y = SiLU(gate) ∘ up with SiLU(g) = g σ(g)."""
    if not is_float32(gate, up) or gate.shape != up.shape:
        return fall_back_to_formula(ops.swiglu_forward, gate, up)
    gate, up = contiguous(gate), contiguous(up)
    y = empty(gate.shape)
    _forward(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
    return y, SwiGLUKernelSaved(gate, up)


def swiglu_backward(dy: np.ndarray, saved: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of gate and up."""
    if not isinstance(saved, SwiGLUKernelSaved) or not is_float32(dy) or dy.shape != saved.gate.shape:
        return fall_back_to_formula(ops.swiglu_backward, dy, saved)
    dgate, dup = empty(dy.shape), empty(dy.shape)
    gate, up = saved
    _backward(contiguous(dy).reshape(-1), gate.reshape(-1), up.reshape(-1), dgate.reshape(-1), dup.reshape(-1))
    return dgate, dup


KERNELS = (_forward, _backward)
