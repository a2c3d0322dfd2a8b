"""SwiGLU: one branch times the SiLU of the other."""

from __future__ import annotations

from typing import NamedTuple

from onfoot.arrays import Array, namespace


class SwiGLUSaved(NamedTuple):
    gate: Array
    up: Array


def sigmoid(x: Array) -> Array:
    """σ(x) = 1/(1 + exp(−x)), written with tanh, which cannot overflow."""
    return 0.5 * (1 + namespace(x).tanh(0.5 * x))


def swiglu_forward(gate: Array, up: Array) -> tuple[Array, SwiGLUSaved]:
    """y = SiLU(gate) ∘ up with SiLU(g) = g σ(g)."""
    return gate * sigmoid(gate) * up, SwiGLUSaved(gate, up)  # eq GLU.1


def swiglu_backward(dy: Array, saved: SwiGLUSaved) -> tuple[Array, Array]:
    """Gradients of gate and up."""
    gate, up = saved
    s = sigmoid(gate)
    silu = gate * s
    dgate = dy * up * (s + silu * (1 - s))  # eq GLU.2  SiLU' = σ + g σ (1 − σ)
    dup = dy * silu  # eq GLU.3
    return dgate, dup
