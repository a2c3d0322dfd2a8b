"""Known mistakes in SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

from onfoot.check.layer import Mistake, Piece


def _mistake(
    name: str, explains: str, fix: str, apply: Callable[..., dict[str, Piece]], equation: str = "GLU.2"
) -> Mistake:
    return Mistake(name, "swiglu", explains, equation, fix, apply)


SLOPE = "silu'(x) = σ(x) + x σ(x)(1 − σ(x))"

MISTAKES = (
    _mistake(
        "σ in place of silu's derivative",
        "x σ(x) is a product: the term x σ(x)(1 − σ(x)) is missing.",
        SLOPE,
        lambda p: {"silu_slope": lambda gate, s: s},
    ),
    _mistake(
        "σ' in place of silu's derivative",
        "σ(x)(1 − σ(x)) is the derivative of the sigmoid.",
        SLOPE,
        lambda p: {"silu_slope": lambda gate, s: s * (1 - s)},
    ),
    _mistake(
        "the first term of silu's derivative missing",
        "x σ(x)(1 − σ(x)) alone: the product x σ(x) has two terms.",
        SLOPE,
        lambda p: {"silu_slope": lambda gate, s: gate * s * (1 - s)},
    ),
    _mistake(
        "silu' evaluated at silu(x)",
        "The derivative is evaluated at silu(x) instead of x.",
        SLOPE,
        lambda p: {"silu_slope": lambda gate, s: p.silu_slope(gate * s, p.sigmoid(gate * s))},
    ),
    _mistake(
        "up missing from dgate",
        "dgate = dout ∘ silu'(gate): out is a product with up.",
        "dgate = dout ∘ up ∘ silu'(gate)",
        lambda p: {"dgate": lambda dy, up, slope, silu: dy * slope},
    ),
    _mistake(
        "gate in place of silu(gate) in dup",
        "dup = dout ∘ gate.",
        "dup = dout ∘ silu(gate)",
        lambda p: {"dup": lambda dy, silu, gate, s: dy * gate},
        "GLU.3",
    ),
    _mistake(
        "σ(gate) in place of silu(gate) in dup",
        "dup = dout ∘ σ(gate).",
        "dup = dout ∘ silu(gate)",
        lambda p: {"dup": lambda dy, silu, gate, s: dy * s},
        "GLU.3",
    ),
)
