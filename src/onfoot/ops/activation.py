"""Activations: ReLU, GELU in its tanh form (GPT-2's `gelu_new`) and GELU in its exact form with erf (`gelu`).

The derivative must be that of the same form: the other form's is off by about 1e-3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from onfoot.arrays import Array, erf, namespace

ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
CUBIC = 0.044715  # the coefficient of x³ in the tanh form


class ActivationSaved(NamedTuple):
    x: Array


def relu_forward(x: Array) -> tuple[Array, ActivationSaved]:
    """y = max(x, 0)."""
    return namespace(x).where(x <= 0, 0, x), ActivationSaved(x)  # eq G.1


def relu_backward(dy: Array, saved: ActivationSaved) -> Array:
    """dx = dy where x > 0."""
    return namespace(dy).where(saved.x <= 0, 0, dy)  # eq G.2


def gelu_tanh_forward(x: Array) -> tuple[Array, ActivationSaved]:
    """y = x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³)."""
    xp = namespace(x)
    u = ROOT_2_OVER_PI * (x + CUBIC * (x * x * x))
    return 0.5 * x * (1 + xp.tanh(u)), ActivationSaved(x)  # eq G.3


def gelu_tanh_backward(dy: Array, saved: ActivationSaved) -> Array:
    """dx = dy ∘ [ (1 + tanh u)/2 + x/2 (1 − tanh² u) u' ]."""
    (x,) = saved
    xp = namespace(x)
    x2 = x * x
    tanh = xp.tanh(ROOT_2_OVER_PI * (x + CUBIC * (x2 * x)))
    du = ROOT_2_OVER_PI * (1 + 3 * CUBIC * x2)
    return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * du)  # eq G.4


def gelu_erf_forward(x: Array) -> tuple[Array, ActivationSaved]:
    """y = x Φ(x), with Φ the cumulative distribution function of the standard normal."""
    return 0.5 * x * (1 + erf(x / math.sqrt(2))), ActivationSaved(x)  # eq G.5


def gelu_erf_backward(dy: Array, saved: ActivationSaved) -> Array:
    """dx = dy ∘ [ Φ(x) + x φ(x) ]."""
    (x,) = saved
    xp = namespace(x)
    cumulative = 0.5 * (1 + erf(x / math.sqrt(2)))
    density = xp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (cumulative + x * density)  # eq G.6


# Hugging Face's name of an activation -> the name of its pair in an engine's table
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu": "gelu_erf", "relu": "relu"}
