"""The tangents of SwiGLU."""

from __future__ import annotations

from onfoot.arrays import Array
from onfoot.ops.swiglu import SwiGLUSaved, sigmoid


def swiglu_tangent(gate_dot: Array, up_dot: Array, saved: SwiGLUSaved) -> tuple[Array, SwiGLUSaved]:
    """ẏ = SiLU'(gate) ∘ gate-tangent ∘ up + SiLU(gate) ∘ up-tangent."""
    silu, slope, _ = _silu(saved.gate)
    y_dot = slope * gate_dot * saved.up + silu * up_dot  # eq GLU.4
    return y_dot, SwiGLUSaved(gate_dot, up_dot)


def swiglu_backward_tangent(
    dy: Array, dy_dot: Array, saved: SwiGLUSaved, saved_dot: SwiGLUSaved
) -> tuple[Array, Array]:
    """Tangents of the gradients of gate and up."""
    (gate, up), (gate_dot, up_dot) = saved, saved_dot
    silu, slope, curvature = _silu(gate)
    dgate_dot = (dy_dot * up + dy * up_dot) * slope + dy * up * curvature * gate_dot  # eq GLU.5
    dup_dot = dy_dot * silu + dy * slope * gate_dot  # eq GLU.6
    return dgate_dot, dup_dot


def _silu(gate: Array) -> tuple[Array, Array, Array]:
    """SiLU with its first and second derivative."""
    s = sigmoid(gate)
    silu = gate * s
    slope = s + silu * (1 - s)
    curvature = s * (1 - s) * (2 + gate * (1 - 2 * s))  # eq GLU.7
    return silu, slope, curvature
