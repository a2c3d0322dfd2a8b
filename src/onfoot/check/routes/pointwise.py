"""GELU and SwiGLU with every factor of their derivatives as a step of its own."""

from __future__ import annotations

import math

import numpy as np

from onfoot.arrays import erf
from onfoot.check.layer import Array, Gradients, Pieces
from onfoot.check.routes.route import Route
from onfoot.ops.activation import CUBIC, ROOT_2_OVER_PI


def _tanh_form(p: Pieces, x: Array, dout: Array, form: str = "tanh") -> Gradients:
    u = p.gelu_u(x, p.gelu_cube(x), p.gelu_cubic(), p.gelu_root())
    tanh = p.gelu_tanh(u)
    du = p.gelu_du(p.gelu_square(x), p.gelu_cubic_slope(), p.gelu_root())
    right = p.gelu_right(x, p.gelu_sech_square(p.gelu_sech(u)), du)
    return (p.gelu_dx(dout, p.gelu_sum(p.gelu_left(tanh), right)),)


def _sech(u: Array) -> Array:
    return 2 * np.exp(-np.abs(u)) / (1 + np.exp(-2 * np.abs(u)))


TANH = Route(
    "gelu",
    Pieces(
        gelu_cubic=lambda: CUBIC,
        gelu_root=lambda: ROOT_2_OVER_PI,
        gelu_cubic_slope=lambda: 3 * CUBIC,
        gelu_cube=lambda x: x**3,
        gelu_square=lambda x: x**2,
        gelu_u=lambda x, cube, cubic, root: root * (x + cubic * cube),
        gelu_tanh=lambda u: np.tanh(u),
        gelu_sech=lambda u: _sech(u),
        gelu_sech_square=lambda sech: sech * sech,
        gelu_du=lambda square, cubic_slope, root: root * (1 + cubic_slope * square),
        gelu_left=lambda tanh: 0.5 * (1 + tanh),
        gelu_right=lambda x, sech_square, du: 0.5 * x * sech_square * du,
        gelu_sum=lambda left, right: left + right,
    ),
    _tanh_form,
    {
        "gelu_cubic": ("0.044715", "u = √(2/π)(x + 0.044715 x³)"),
        "gelu_root": ("√(2/π)", "u = √(2/π)(x + 0.044715 x³)"),
        "gelu_cubic_slope": ("3 · 0.044715", "u' = √(2/π)(1 + 3 · 0.044715 x²)"),
        "gelu_cube": ("x³ in u", "u = √(2/π)(x + 0.044715 x³)"),
        "gelu_square": ("x² in u'", "u' = √(2/π)(1 + 3 · 0.044715 x²)"),
        "gelu_u": ("u", "√(2/π)(x + 0.044715 x³)"),
        "gelu_tanh": ("tanh u", "with u = √(2/π)(x + 0.044715 x³)"),
        "gelu_sech": ("sech u", "1/cosh u"),
        "gelu_sech_square": ("sech² u = 1 − tanh² u", "the square of sech u"),
        "gelu_du": ("u', the derivative of u", "√(2/π)(1 + 3 · 0.044715 x²)"),
        "gelu_left": ("½ (1 + tanh u)", "the first term of the derivative"),
        "gelu_right": ("½ x (1 − tanh² u) u'", "the second term of the derivative"),
        "gelu_sum": ("gelu'(x)", "½ (1 + tanh u) + ½ x (1 − tanh² u) u'"),
    },
    {"form": "tanh"},
)


def _erf_form(p: Pieces, x: Array, dout: Array, form: str = "erf") -> Gradients:
    left = p.normal_left(p.normal_erf(p.normal_scaled(x)))
    density = p.normal_density(p.normal_exp(p.normal_exponent(x)), p.normal_constant())
    return (p.gelu_dx(dout, p.normal_sum(left, p.normal_right(x, density))),)


ERF = Route(
    "gelu",
    Pieces(
        normal_scaled=lambda x: x / math.sqrt(2),
        normal_erf=lambda scaled: erf(scaled),
        normal_left=lambda erf_of: 0.5 * (1 + erf_of),
        normal_exponent=lambda x: -0.5 * x * x,
        normal_exp=lambda exponent: np.exp(exponent),
        normal_constant=lambda: 1 / math.sqrt(2 * math.pi),
        normal_density=lambda e, constant: e * constant,
        normal_right=lambda x, density: x * density,
        normal_sum=lambda left, right: left + right,
    ),
    _erf_form,
    {
        "normal_scaled": ("x/√2 in erf", "Φ(x) = ½ (1 + erf(x/√2))"),
        "normal_erf": ("erf(x/√2)", "Φ(x) = ½ (1 + erf(x/√2))"),
        "normal_left": ("Φ(x)", "½ (1 + erf(x/√2))"),
        "normal_exponent": ("−x²/2 in the density φ(x)", "φ(x) = exp(−x²/2)/√(2π)"),
        "normal_exp": ("exp(−x²/2)", "φ(x) = exp(−x²/2)/√(2π)"),
        "normal_constant": ("1/√(2π) in the density φ(x)", "φ(x) = exp(−x²/2)/√(2π)"),
        "normal_density": ("the density φ(x)", "exp(−x²/2)/√(2π)"),
        "normal_right": ("x φ(x)", "x times the density"),
        "normal_sum": ("gelu'(x)", "Φ(x) + x φ(x)"),
    },
    {"form": "erf"},
)


def _swiglu_sum(p: Pieces, gate: Array, up: Array, dout: Array) -> Gradients:
    s = p.sigmoid(gate)
    silu = p.silu(gate, s)
    slope = p.silu_sum(s, p.silu_rest(silu, p.sigmoid_rest(s)))
    return p.through_silu(p.dsilu(dout, up), slope), p.dup(dout, silu, gate, s)


def _swiglu_product(p: Pieces, gate: Array, up: Array, dout: Array) -> Gradients:
    s = p.sigmoid(gate)
    slope = p.silu_product(s, p.one_plus(p.gate_rest(gate, p.sigmoid_rest(s))))
    return p.through_silu(p.dsilu(dout, up), slope), p.dup(dout, p.silu(gate, s), gate, s)


SHARED = Pieces(
    sigmoid_rest=lambda s: 1 - s,
    dsilu=lambda dy, up: dy * up,
    through_silu=lambda dsilu, slope: dsilu * slope,
)
SHARED_WORDS = {
    "sigmoid_rest": ("1 − σ in silu'", "silu' = σ + silu (1 − σ)"),
    "dsilu": ("the gradient of silu(gate)", "dout ∘ up"),
    "through_silu": ("dgate", "dout ∘ up ∘ silu'(gate)"),
}
SWIGLU = (
    Route(
        "swiglu",
        Pieces(
            **vars(SHARED),
            silu_rest=lambda silu, rest: silu * rest,
            silu_sum=lambda s, rest: s + rest,
        ),
        _swiglu_sum,
        {
            **SHARED_WORDS,
            "silu_rest": ("silu (1 − σ) in silu'", "silu' = σ + silu (1 − σ)"),
            "silu_sum": ("silu'", "σ + silu (1 − σ)"),
        },
    ),
    Route(
        "swiglu",
        Pieces(
            **vars(SHARED),
            gate_rest=lambda gate, rest: gate * rest,
            one_plus=lambda rest: 1 + rest,
            silu_product=lambda s, one_plus: s * one_plus,
        ),
        _swiglu_product,
        {
            **SHARED_WORDS,
            "gate_rest": ("x (1 − σ) in silu'", "silu' = σ (1 + x (1 − σ))"),
            "one_plus": ("1 + x (1 − σ) in silu'", "silu' = σ (1 + x (1 − σ))"),
            "silu_product": ("silu'", "σ (1 + x (1 − σ))"),
        },
    ),
)
